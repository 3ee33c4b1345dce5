// Exact conversion of 16 MXFP8 or NVFP4 elements and their scale to BF16.
#pragma once

#include "common/ptx/arithmetic.cuh"
#include "gemm/sm90/epilogue/store_accumulators.cuh"

namespace transformer_plugin::gemm::sm90 {

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t x, uint32_t y) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
  return product;
}
__device__ __forceinline__ uint32_t duplicate_half(uint32_t half) { return half * 0x10001; }

inline constexpr uint32_t kNaN = 0x7fc0, kExponentOne = 0x80;  // of BF16: NaN, and 1 in the exponent field
inline constexpr int kChunk = 16;                              // elements converted at a time
// A chunk in BF16, two elements a word. Their order depends on the format; both operands use the same, so
// products match.
using DequantizedChunk = uint32_t[kChunk / 2];

// MXFP8: E4M3 or E5M2 elements, one E8M0 scale for 32.
template <DType element>
struct MxFormat {
  using Packed = uint4;                             // a chunk
  static constexpr int kScaleShift = 5;             // log2 of the elements of a scale
  static constexpr float kResidualScale = 1.0f;     // factor that dequantize() leaves to the epilogue
  static constexpr bool kOrderedWarpgroups = true;  // WarpgroupOrder in grouped_gemm_mx_nv.cuh

  static __device__ __forceinline__ void dequantize(const Packed& packed, uint32_t scale,
                                                    DequantizedChunk& values) {
    constexpr uint32_t kSmallest = 0x00400000, kNaN = 0x7fffffff;  // 2^-127 is a subnormal FP32
    const float factor = __uint_as_float(scale == 255 ? kNaN : max(scale << 23, kSmallest));
    const uint32_t words[] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      values[j * 2] = scale_to_bf16x2(to_half2<0>(words[j]), factor);
      values[j * 2 + 1] = scale_to_bf16x2(to_half2<2>(words[j]), factor);
    }
  }

 private:
  static_assert(element == DType::kFloat8E4M3 || element == DType::kFloat8E5M2, "FP8");

  // Elements `first` and `first` + 1 of a word of four, in FP16. E5M2 is the upper byte of FP16.
  template <int first>
  static __device__ __forceinline__ uint32_t to_half2(uint32_t word) {
    if constexpr (element == DType::kFloat8E5M2) {
      return __byte_perm(word, 0, first == 0 ? 0x1404 : 0x3424);
    } else {
      return cvt_f16x2_e4m3x2(static_cast<uint16_t>(word >> first * 8));
    }
  }
  static __device__ __forceinline__ uint32_t scale_to_bf16x2(uint32_t half2_bits, float factor) {
    __half2 both;
    memcpy(&both, &half2_bits, sizeof(both));
    const float2 values = __half22float2(both);
    return pack2<__nv_bfloat16>(values.x * factor, values.y * factor);
  }
};

// NVFP4: E2M1 elements, one E4M3 scale for 16. The amax of the tensor is part of alpha. The bits of an E2M1
// element, moved to the sign, exponent and mantissa fields of BF16, are its value times 2^-126; the factor
// corrects that as far as BF16 has range. Scales are at most 448, so a factor of 2^8 is left to the epilogue.
struct NvFormat {
  using Packed = uint2;
  static constexpr int kScaleShift = 4;
  static constexpr float kResidualScale = 256.0f;
  static constexpr bool kOrderedWarpgroups = false;

  static __device__ __forceinline__ void dequantize(const Packed& packed, uint32_t scale,
                                                    DequantizedChunk& values) {
    const uint32_t bits = (scale & 0x80) << 8 | (scale & 0x7f) << 4;  // the scale times 2^-120
    const uint32_t exact = mul_bf16x2(bits, (120 + 127) * kExponentOne);
    const uint32_t larger = mul_bf16x2(exact, (118 + 127) * kExponentOne);  // upper halves of words are zero
    const uint32_t factor = duplicate_half((scale & 0x7f) == 0x7f ? kNaN : larger);
    const uint32_t words[] = {packed.x, packed.y};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t x = words[j];
      values[j * 4] = mul_bf16x2((x << 12 & 0x80008000) | (x << 6 & 0x01c001c0), factor);
      values[j * 4 + 1] = mul_bf16x2((x << 8 & 0x80008000) | (x << 2 & 0x01c001c0), factor);
      values[j * 4 + 2] = mul_bf16x2((x << 4 & 0x80008000) | (x >> 2 & 0x01c001c0), factor);
      values[j * 4 + 3] = mul_bf16x2((x & 0x80008000) | (x >> 6 & 0x01c001c0), factor);
    }
  }
};

}  // namespace transformer_plugin::gemm::sm90
