// 16 values under one scale to E2M1: what a thread does with them.
//
// A GPU has half as many units for minima, shifts and bytes as for products and sums, so codes are found and put
// together by products and sums where that can be. Values that are NaN, or not below 7 in units of their scale, which no
// scale found from their own largest magnitude leaves them unless it is subnormal, go a longer way, out of line.
#pragma once

#include "quantize/nv_hadamard.cuh"

namespace transformer_plugin::quantize {

// kAny: as the method says when the kernel runs. For kernels that are not worth an instance of each.
enum class NvCoding { kNearest, kStochastic, kFourOverSix, kAny };

// Eight codes in each word.
struct NvBlock {
  uint2 codes;
  uint8_t scale;
};

// Values, and the sign of each where bit 3 of its code will be.
struct NvValues {
  float at[kNvBlock];
  uint2 signs;
};

// Below it the nearest place is at most 7.
inline constexpr float kNvFastBound = 7.0f;

// Bit 7 of bytes: those of values 0, 2, 4 and 6, and of values 1, 3, 5 and 7.
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

// Of four words, each of two neighbours.
__device__ __forceinline__ uint32_t signs_of(const uint32_t* pairs) {
  const uint32_t low = __byte_perm(pairs[0], pairs[1], 0x7351),
                 high = __byte_perm(pairs[2], pairs[3], 0x7351);
  return place_signs(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
}

// Largest magnitudes of which a NaN is one; of two neighbours with a sign that means nothing.
__device__ __forceinline__ float max_abs_nan(float largest, float value) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(largest), "f"(fabsf(value)));
  return result;
}
__device__ __forceinline__ Two<float> max_abs_nan(Two<float> largest, Two<float> values) {
  return {max_abs_nan(largest.x, values.x), max_abs_nan(largest.y, values.y)};
}
template <typename T>
__device__ __forceinline__ Two<T> max_abs_nan(Two<T> largest, Two<T> values) {
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

// 16 neighbours that lie in pairs. Returns their largest magnitude, NaN if one is.
template <typename T>
__device__ __forceinline__ float unpack(const NvPairs<T>& pairs, NvValues& values) {
  Two<T> largest = zeros<T>();
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

// The largest magnitude that is a number.
__device__ __noinline__ inline float largest_number(const float (&x)[kNvBlock]) {
  float largest = 0.0f;
  for (int i = 0; i < kNvBlock; ++i) largest = fmaxf(largest, fabsf(x[i]));
  return largest;
}

template <typename Round>
__device__ __forceinline__ uint2 pack(const float (&x)[kNvBlock], float factor, Round&& round) {
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kNvBlock; ++i) words[i / 8] |= round(x[i] * factor, i) << (4 * (i % 8));
  return {words[0], words[1]};
}

// Of any values.
__device__ __forceinline__ uint2 pack_any(const float (&x)[kNvBlock], float factor) {
  return pack(x, factor, [](float value, int) { return e2m1_nearest(value); });
}
__device__ __forceinline__ uint2 pack_any(const float (&x)[kNvBlock], float factor, const Philox4& random) {
  return pack(x, factor,
              [&](float value, int i) { return e2m1_stochastic(value, random.word[i / 4], i % 4); });
}

// The same, out of line. Their arguments are in memory, so callers give them a copy that only they have.
__device__ __noinline__ inline uint2 pack_rare(const float (&x)[kNvBlock], float factor) {
  return pack_any(x, factor);
}
__device__ __noinline__ inline uint2 pack_rare(const float (&x)[kNvBlock], float factor,
                                               const Philox4& random) {
  return pack_any(x, factor, random);
}

// The least of three floats that are not negative: they order like their bits, for which there is one instruction.
__device__ __forceinline__ uint32_t least_bits(float a, float b, float c) {
  return __vimin3_u32(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c));
}

// Eight codes without signs. Places are the last bits of floats (fp4.h), which add up as integers: of the bits above them
// those of the first two codes are left, and taken away.
__device__ __forceinline__ uint32_t pack_places(const float* x, float factor) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    const float p = fabsf(x[i]) * factor;
    const float a = fmaf(p, 2.0f, kE2m1Shift), b = p + (kE2m1Shift + 2.0f),
                c = fmaf(p, 0.5f, kE2m1Shift + 4.0f);
    word = word * 16u + least_bits(a, b, c);
  }
  return word - (kE2m1ShiftBits + (kE2m1ShiftBits << 4));
}

// Four codes, rounded at random, in the even half bytes: of each value e2m1_fine_place, of which a float's last 16 bits
// are enough, and its byte.
__device__ __forceinline__ uint32_t pack_stochastic4(const float* x, float factor, uint32_t random) {
  uint32_t fine[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float p = fabsf(x[i]) * factor;
    const float a = __fmaf_rd(p, 512.0f, kE2m1Shift), b = __fmaf_rd(p, 256.0f, kE2m1Shift + 512.0f),
                c = __fmaf_rd(p, 128.0f, kE2m1Shift + 1024.0f);
    fine[i] = least_bits(a, b, c);
  }
  constexpr uint32_t kMost = 0x07ff07ffu;  // of magnitudes past 6
  const uint32_t low =
      __viaddmin_u16x2(__byte_perm(fine[0], fine[1], 0x5410), __byte_perm(random, 0, 0x4140), kMost);
  const uint32_t high =
      __viaddmin_u16x2(__byte_perm(fine[2], fine[3], 0x5410), __byte_perm(random, 0, 0x4342), kMost);
  return __byte_perm(low, high, 0x7531);
}

__device__ __forceinline__ uint32_t pack_stochastic(const float* x, float factor, uint32_t random0,
                                                    uint32_t random1) {
  const uint32_t low = pack_stochastic4(x, factor, random0), high = pack_stochastic4(x + 4, factor, random1);
  return __byte_perm(low | (low >> 4), high | (high >> 4), 0x6420);
}

__device__ __forceinline__ float error_of(const float (&x)[kNvBlock], uint2 codes, float decode,
                                          bool squared) {
  float error = 0.0f;
#pragma unroll
  for (int i = 0; i < kNvBlock; ++i) {
    const uint32_t code = (i < 8 ? codes.x : codes.y) >> (4 * (i % 8));
    error += nv_error(x[i], code, decode, squared);
  }
  return error;
}

__device__ __forceinline__ NvBlock encode_four_over_six(const float (&x)[kNvBlock], float target,
                                                        const NvGlobal& global, bool squared) {
  const NvScale six = nv_scale(fminf(target, 448.0f), global);
  const NvScale four = nv_scale(fminf(target * 1.5f, 448.0f), global);
  const uint2 codes6 = pack_any(x, six.encode), codes4 = pack_any(x, four.encode);
  const bool better = error_of(x, codes4, four.decode, squared) < error_of(x, codes6, six.decode, squared);
  return better ? NvBlock{codes4, four.code} : NvBlock{codes6, six.code};
}

// Whether any scale's inverse can be found by steps that hold for floats far from the ends of their range.
__device__ __forceinline__ bool is_fast(const NvGlobal& global) {
  return global.inverse > 1e-30f && global.inverse < 1e30f;
}

// nv_scale, of a matrix for which is_fast. The steps make a NaN of the inverse of 0, which the minimum leaves out.
__device__ __forceinline__ NvScale nv_scale_fast(float target, const NvGlobal& global) {
  NvScale scale;
  scale.code = nv_e4m3(fminf(target, kLargestFloat));
  scale.decode = nv_e4m3_to_float(scale.code) * global.inverse;
  scale.encode = fminf(reciprocal_by_steps(scale.decode), kLargestFloat);
  return scale;
}

// `amax` is what the scale is found from, `check` at least the largest magnitude of the values, NaN if one is. `number` is
// the block's, for its random bits.
template <NvCoding coding>
__device__ __forceinline__ NvBlock encode_with(const NvArgs& args, const NvValues& values, float amax,
                                               float check, const NvGlobal& global, int64_t number,
                                               uint32_t direction) {
  const float(&x)[kNvBlock] = values.at;
  const float target = amax * global.sixth;
  if constexpr (coding == NvCoding::kFourOverSix) {
    return encode_four_over_six(x, target, global, args.method == NvMethod::kFourOverSixMse);
  }
  NvScale scale = nv_scale_fast(target, global);
  const bool rare = !(check * scale.encode < kNvFastBound && is_fast(global));
  if (rare) scale = nv_scale(target, global);
  uint2 codes;
  if constexpr (coding == NvCoding::kStochastic) {
    const Philox4 random = nv_random(static_cast<uint64_t>(*args.seed), number, direction);
    if (rare) {
      const NvValues copy = values;
      const Philox4 own = random;
      return {pack_rare(copy.at, scale.encode, own), scale.code};
    }
    codes.x = pack_stochastic(x, scale.encode, random.word[0], random.word[1]);
    codes.y = pack_stochastic(x + 8, scale.encode, random.word[2], random.word[3]);
  } else {
    if (rare) {
      const NvValues copy = values;
      return {pack_rare(copy.at, scale.encode), scale.code};
    }
    codes.x = pack_places(x, scale.encode);
    codes.y = pack_places(x + 8, scale.encode);
  }
  codes.x |= values.signs.x;
  codes.y |= values.signs.y;
  return {codes, scale.code};
}

// What is not kNearest, by the method: out of line, for its size.
__device__ __noinline__ inline NvBlock encode_by_method(const NvArgs& args, const NvValues& values,
                                                        float amax, float check, const NvGlobal& global,
                                                        int64_t number, uint32_t direction) {
  if (args.method == NvMethod::kStochastic) {
    return encode_with<NvCoding::kStochastic>(args, values, amax, check, global, number, direction);
  }
  return encode_with<NvCoding::kFourOverSix>(args, values, amax, check, global, number, direction);
}

// Likewise, with any coding.
template <NvCoding coding>
__device__ __forceinline__ NvBlock encode_block(const NvArgs& args, const NvValues& values, float amax,
                                                float check, const NvGlobal& global, int64_t number,
                                                uint32_t direction) {
  if constexpr (coding == NvCoding::kAny) {
    if (args.method == NvMethod::kNearest) {
      return encode_with<NvCoding::kNearest>(args, values, amax, check, global, number, direction);
    }
    const NvValues copy = values;
    return encode_by_method(args, copy, amax, check, global, number, direction);
  } else {
    return encode_with<coding>(args, values, amax, check, global, number, direction);
  }
}

// The largest magnitude that is a number, given the largest that may be NaN.
__device__ __forceinline__ float number_of(float check, const NvValues& values) {
  if (check == check) return check;
  const NvValues copy = values;
  return largest_number(copy.at);
}

}  // namespace transformer_plugin::quantize
