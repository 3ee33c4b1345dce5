// Encodes 16 values that share a scale to E2M1, in one thread.
//
// A GPU has half as many units for minima, shifts and byte permutations as for FP32 multiplications and
// additions, so elements are encoded and packed by the latter where possible. Values that are NaN, or not
// below 7 in units of their scale, take a slower path that is not inlined. A scale computed from the values'
// own amax leaves no such value, unless it is subnormal.
#pragma once

#include "common/ptx/arithmetic.cuh"
#include "quantize/cuda/nvfp4/hadamard.cuh"

namespace transformer_plugin::quantize {

// kRuntime: the method is read from the arguments. For kernels that do not justify one instance per method.
enum class NvEncoding { kNearest, kStochastic, kFourOverSix, kRuntime };

// Eight elements per word.
struct NvBlock {
  uint2 data;
  uint8_t scale;
};

// Values, and their signs at the positions of bit 3 of the encoded elements.
struct NvBlockValues {
  float at[kNvBlock];
  uint2 signs;
};

// Below it the nearest position in the list of E2M1 values is at most 7.
inline constexpr float kNvFastBound = 7.0f;

// Takes bit 7 of each byte: from values 0, 2, 4 and 6, and from values 1, 3, 5 and 7.
__device__ __forceinline__ uint32_t place_signs(uint32_t even, uint32_t odd) {
  return ((even >> 4) & 0x08080808u) | (odd & 0x80808080u);
}

__device__ __forceinline__ uint32_t top_bytes(float a, float b, float c, float d) {
  const uint32_t ab = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0073);
  return __byte_perm(ab, __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0073), 0x5410);
}

__device__ __forceinline__ uint32_t signs_of(const float* x) {
  return place_signs(top_bytes(x[0], x[2], x[4], x[6]), top_bytes(x[1], x[3], x[5], x[7]));
}

// From four words of two neighbouring values each.
__device__ __forceinline__ uint32_t signs_of(const uint32_t* pairs) {
  const uint32_t low = __byte_perm(pairs[0], pairs[1], 0x7351),
                 high = __byte_perm(pairs[2], pairs[3], 0x7351);
  return place_signs(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
}

// Maximum of magnitudes that propagates NaN. For pairs of 16-bit values the sign of the result is
// meaningless.
__device__ __forceinline__ float max_abs_nan(float largest, float value) {
  return ptx::max_nan(largest, fabsf(value));
}
__device__ __forceinline__ Packed2<float> max_abs_nan(Packed2<float> largest, Packed2<float> values) {
  return {max_abs_nan(largest.x, values.x), max_abs_nan(largest.y, values.y)};
}
template <typename T>
__device__ __forceinline__ Packed2<T> max_abs_nan(Packed2<T> largest, Packed2<T> values) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  uint32_t x, y;
  memcpy(&x, &largest, sizeof(x));
  memcpy(&y, &values, sizeof(y));
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("max.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  } else {
    asm("max.NaN.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  }
  memcpy(&largest, &x, sizeof(x));
  return largest;
#else
  return {__hmax2_nan(__habs2(largest), __habs2(values))};
#endif
}

// Unpacks 16 neighbouring values. Returns the maximum of their magnitudes, NaN if one of them is.
template <typename T>
__device__ __forceinline__ float unpack(const NvPairs<T>& pairs, NvBlockValues& values) {
  Packed2<T> largest = zeros<T>();
#pragma unroll
  for (int i = 0; i < kNvBlock / 2; ++i) {
    largest = max_abs_nan(largest, pairs[i]);
    const float2 two = to_floats(pairs[i]);
    values.at[2 * i] = two.x;
    values.at[2 * i + 1] = two.y;
  }
  if constexpr (sizeof(T) == 2) {
    uint32_t words[kNvBlock / 2];
    memcpy(words, pairs, sizeof(words));
    values.signs = {signs_of(words), signs_of(words + 4)};
  } else {
    values.signs = {signs_of(values.at), signs_of(values.at + 8)};
  }
  const float2 two = to_floats(largest);
  return max_abs_nan(fabsf(two.x), two.y);
}

template <typename Round>
__device__ __forceinline__ uint2 pack(const float (&x)[kNvBlock], float factor, Round&& round) {
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kNvBlock; ++i) words[i / 8] |= round(x[i] * factor, i) << (4 * (i % 8));
  return {words[0], words[1]};
}

// For any values.
__device__ __forceinline__ uint2 pack_any(const float (&x)[kNvBlock], float factor) {
  return pack(x, factor, [](float value, int) { return e2m1_nearest(value); });
}
__device__ __forceinline__ uint2 pack_any(const float (&x)[kNvBlock], float factor, const Philox4& random) {
  return pack(x, factor,
              [&](float value, int i) { return e2m1_stochastic(value, random.word[i / 4], i % 4); });
}

// The minimum of three non-negative floats. They order like their bits, for which there is one instruction.
__device__ __forceinline__ uint32_t least_bits(float a, float b, float c) {
  return __vimin3_u32(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c));
}

// Encodes eight values. The position of a magnitude is in the last bits of a float (fp4.h); these are added
// as integers. Of the constant bits above them, those of the first two elements remain in the word and are
// subtracted.
__device__ __forceinline__ uint32_t pack_nearest(const float* x, float factor, uint32_t signs) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    const float p = fabsf(x[i]) * factor;
    const float a = fmaf(p, 2.0f, kE2m1Shift), b = p + (kE2m1Shift + 2.0f),
                c = fmaf(p, 0.5f, kE2m1Shift + 4.0f);
    word = word * 16u + least_bits(a, b, c);
  }
  return word + signs - (kE2m1ShiftBits + (kE2m1ShiftBits << 4));
}

// Encodes two magnitudes, given in units of 4 times their scale, with stochastic rounding; the result begins
// at bit 9 of each half. The low parts of the halves of `bytes` hold the random bytes.
//
// E2M1 of at least 1 is a float truncated after the first mantissa bit. Below 1 its steps are uniform, as
// those of (p + 1) / 2 are, which is the larger expression there and the smaller one above 1. A quarter of
// that, as a half-precision float, has the encoded position above 9 bits, to which the random byte adds its
// bits from bit 1 on: the truncated bits below them could not cause a carry.
__device__ __forceinline__ uint32_t random_places(float low, float high, uint32_t bytes) {
  const float a = fmaxf(low, __fmaf_rd(low, 0.5f, 0.125f)), b = fmaxf(high, __fmaf_rd(high, 0.5f, 0.125f));
  uint32_t halves;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(b), "f"(a));
  constexpr uint32_t kMost = 0x3fff3fffu;  // for magnitudes above 6
  return __vminu2(halves + 2u * bytes, kMost);
}

// Encodes four values into bytes 0 and 2.
__device__ __forceinline__ uint32_t pack_random4(const float* x, float quarter, uint32_t random) {
  const uint32_t even = random_places(fabsf(x[0]) * quarter, fabsf(x[2]) * quarter, random & 0x00ff00ffu);
  const uint32_t odd =
      random_places(fabsf(x[1]) * quarter, fabsf(x[3]) * quarter, __byte_perm(random, 0, 0x4341));
  return ((even >> 9) & 0x00070007u) | ((odd >> 5) & 0x00700070u);
}

__device__ __forceinline__ uint32_t pack_random(const float* x, float quarter, uint32_t random0,
                                                uint32_t random1, uint32_t signs) {
  const uint32_t low = pack_random4(x, quarter, random0), high = pack_random4(x + 4, quarter, random1);
  return __byte_perm(low, high, 0x6420) | signs;
}

__device__ __forceinline__ float error_of(const float (&x)[kNvBlock], uint2 data, float scale, float amax,
                                          bool squared) {
  float error = 0.0f;
#pragma unroll
  for (int i = 0; i < kNvBlock; ++i) {
    const uint32_t bits = (i < 8 ? data.x : data.y) >> (4 * (i % 8));
    error += nv_error(x[i], bits, scale, amax, squared);
  }
  return error;
}

__device__ __forceinline__ NvBlock encode_four_over_six(const float (&x)[kNvBlock], float target,
                                                        const NvGlobal& global, bool squared) {
  const NvScale six = nv_scale(fminf(target, 448.0f), global.inverse);
  const NvScale four = nv_scale(fminf(target * 1.5f, 448.0f), global.inverse);
  const uint2 data6 = pack_any(x, six.encode), data4 = pack_any(x, four.encode);
  const float error6 = error_of(x, data6, six.value, global.amax, squared),
              error4 = error_of(x, data4, four.value, global.amax, squared);
  const bool better = error4 < error6;
  return better ? NvBlock{data4, four.bits} : NvBlock{data6, six.bits};
}

// Whether the inverse of every scale of the matrix can be computed by reciprocal_by_steps, which requires
// floats far from the ends of their range.
__device__ __forceinline__ bool is_fast(const NvGlobal& global) {
  return global.inverse > 1e-30f && global.inverse < 1e30f;
}

// nv_scale for a matrix for which is_fast holds and a target that is not NaN. The inverse of 0 becomes NaN,
// which fminf ignores.
__device__ __forceinline__ NvScale nv_scale_fast(float target, float inverse) {
  uint16_t bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(0.0f), "f"(target));
  const uint32_t halves = ptx::cvt_f16x2_e4m3x2(bits);
  __half2 value;
  memcpy(&value, &halves, sizeof(value));
  NvScale scale;
  scale.bits = static_cast<uint8_t>(bits);
  scale.value = __low2float(value);
  scale.encode = fminf(reciprocal_by_steps(scale.value * inverse), kLargestFloat);
  return scale;
}

// The maximum of the magnitudes, NaN ignored.
__device__ __forceinline__ float largest_number(const float (&x)[kNvBlock]) {
  float largest = 0.0f;
  for (int i = 0; i < kNvBlock; ++i) largest = fmaxf(largest, fabsf(x[i]));
  return largest;
}

// Encodes any block. `factor` and `inverse` are those of NvGlobal. Not inlined; all arguments are in registers.
template <NvEncoding encoding>
__device__ __noinline__ NvBlock encode_any_values(const NvBlockValues values, float amax, float factor,
                                                  float inverse, const Philox4 random) {
  const float known = amax == amax ? amax : largest_number(values.at);
  const NvScale scale = nv_scale(nv_target(known, factor, false), inverse);
  if constexpr (encoding == NvEncoding::kStochastic)
    return {pack_any(values.at, scale.encode, random), scale.bits};
  return {pack_any(values.at, scale.encode), scale.bits};
}

// `amax` determines the scale; `check` is at least the maximum of the values' magnitudes. Either is NaN if it
// was computed from values with a NaN.
template <NvEncoding encoding>
__device__ __forceinline__ NvBlock encode_with(NvMethod method, const NvBlockValues& values, float amax,
                                               float check, const NvGlobal& global, const Philox4& random) {
  const float(&x)[kNvBlock] = values.at;
  if constexpr (encoding == NvEncoding::kFourOverSix) {
    const float known = amax == amax ? amax : largest_number(x);
    return encode_four_over_six(x, nv_target(known, global.factor, true), global,
                                method == NvMethod::kFourOverSixMse);
  }
  const NvScale scale = nv_scale_fast(nv_target(amax, global.factor, false), global.inverse);
  const bool is_common = check * scale.encode < kNvFastBound && is_fast(global);
  if (!is_common) return encode_any_values<encoding>(values, amax, global.factor, global.inverse, random);
  const uint2 signs = values.signs;
  uint2 data;
  if constexpr (encoding == NvEncoding::kStochastic) {
    const float quarter = scale.encode * 0.25f;
    data.x = pack_random(x, quarter, random.word[0], random.word[1], signs.x);
    data.y = pack_random(x + 8, quarter, random.word[2], random.word[3], signs.y);
  } else {
    data.x = pack_nearest(x, scale.encode, signs.x);
    data.y = pack_nearest(x + 8, scale.encode, signs.y);
  }
  return {data, scale.bits};
}

// Methods other than kNearest, selected at run time. Not inlined because of its size.
__device__ __noinline__ inline NvBlock encode_by_method(NvMethod method, const NvBlockValues values,
                                                        float amax, float check, const NvGlobal global,
                                                        const Philox4 random) {
  if (method == NvMethod::kStochastic) {
    return encode_with<NvEncoding::kStochastic>(method, values, amax, check, global, random);
  }
  return encode_with<NvEncoding::kFourOverSix>(method, values, amax, check, global, random);
}

// The same for any encoding.
template <NvEncoding encoding>
__device__ __forceinline__ NvBlock encode_block(NvMethod method, const NvBlockValues& values, float amax,
                                                float check, const NvGlobal& global, const Philox4& random) {
  if constexpr (encoding != NvEncoding::kRuntime) {
    return encode_with<encoding>(method, values, amax, check, global, random);
  } else {
    if (method != NvMethod::kNearest) return encode_by_method(method, values, amax, check, global, random);
    return encode_with<NvEncoding::kNearest>(method, values, amax, check, global, random);
  }
}

// The random bits of a block, if the method needs them.
template <NvEncoding encoding>
__device__ __forceinline__ Philox4 block_random(const NvArgs& args, int64_t number, uint32_t direction) {
  if (encoding == NvEncoding::kStochastic ||
      (encoding == NvEncoding::kRuntime && args.method == NvMethod::kStochastic)) {
    return nv_random(static_cast<uint64_t>(*args.seed), number, direction);
  }
  return {};
}

}  // namespace transformer_plugin::quantize
