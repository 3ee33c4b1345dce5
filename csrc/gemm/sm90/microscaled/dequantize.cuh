// Codes of microscaled formats to bfloat16, exactly, 16 at a time.
#pragma once

#include "gemm/sm90/pipeline.cuh"

namespace transformer_plugin::gemm::sm90 {

// Two bfloat16.
__device__ __forceinline__ uint32_t multiply_two(uint32_t x, uint32_t y) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
  return product;
}
__device__ __forceinline__ uint32_t twice(uint32_t half) { return half * 0x10001; }

inline constexpr uint32_t kNaN = 0x7fc0, kExponentOne = 0x80;  // of bfloat16
inline constexpr int kChunk = 16;                              // codes
using Values = uint32_t[kChunk / 2];  // two of a chunk each, in an order of the format's own

// MXFP8: E4M3 or E5M2 under one E8M0 for 32 codes.
template <DType element>
struct MxCodes {
  using Codes = uint4;                      // of a chunk
  static constexpr int kScaleShift = 5;     // a scale's codes, as a logarithm
  static constexpr float kLeftOver = 1.0f;  // what the values have yet to be multiplied by
  static constexpr bool kInTurn = true;     // hopper_decoded.cuh

  static __device__ __forceinline__ void decode(const Codes& codes, uint32_t scale, Values& values) {
    constexpr uint32_t kSmallest = 0x00400000, kNaN = 0x7fffffff;  // 2^-127, which is subnormal
    const float factor = __uint_as_float(scale == 255 ? kNaN : max(scale << 23, kSmallest));
    const uint32_t four[] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      values[j * 2] = scaled(halves<0>(four[j]), factor);
      values[j * 2 + 1] = scaled(halves<2>(four[j]), factor);
    }
  }

 private:
  static_assert(element == DType::kFloat8E4M3 || element == DType::kFloat8E5M2, "the FP8 elements");

  // Two of four codes, from the `first` on, as float16, whose upper byte is E5M2.
  template <int first>
  static __device__ __forceinline__ uint32_t halves(uint32_t four) {
    if constexpr (element == DType::kFloat8E5M2) {
      return __byte_perm(four, 0, first == 0 ? 0x1404 : 0x3424);
    } else {
      uint32_t result;
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(static_cast<uint16_t>(four >> first * 8)));
      return result;
    }
  }
  static __device__ __forceinline__ uint32_t scaled(uint32_t halves, float factor) {
    __half2 both;
    memcpy(&both, &halves, sizeof(both));
    const float2 values = __half22float2(both);
    return two_rounded<__nv_bfloat16>(values.x * factor, values.y * factor);
  }
};

// NVFP4: E2M1 under one E4M3 for 16 codes; the amax of the whole stays outside. A code's bits, put where bfloat16 has its own,
// are its value times 2^-126. Scales are up to 448, so what is left over is 2^8.
struct NvCodes {
  using Codes = uint2;
  static constexpr int kScaleShift = 4;
  static constexpr float kLeftOver = 256.0f;
  static constexpr bool kInTurn = false;

  static __device__ __forceinline__ void decode(const Codes& codes, uint32_t scale, Values& values) {
    const uint32_t bits = (scale & 0x80) << 8 | (scale & 0x7f) << 4;  // 2^-120 times the scale
    const uint32_t whole = multiply_two(bits, (120 + 127) * kExponentOne);
    const uint32_t larger = multiply_two(whole, (118 + 127) * kExponentOne);  // the upper halves are zero
    const uint32_t factor = twice((scale & 0x7f) == 0x7f ? kNaN : larger);
    const uint32_t eight[] = {codes.x, codes.y};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t x = eight[j];
      values[j * 4] = multiply_two((x << 12 & 0x80008000) | (x << 6 & 0x01c001c0), factor);
      values[j * 4 + 1] = multiply_two((x << 8 & 0x80008000) | (x << 2 & 0x01c001c0), factor);
      values[j * 4 + 2] = multiply_two((x << 4 & 0x80008000) | (x >> 2 & 0x01c001c0), factor);
      values[j * 4 + 3] = multiply_two((x & 0x80008000) | (x >> 6 & 0x01c001c0), factor);
    }
  }
};

}  // namespace transformer_plugin::gemm::sm90
