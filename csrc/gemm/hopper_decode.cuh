// Codes of microscaled formats to bfloat16, exactly, 16 at a time.
#pragma once

#include "gemm/hopper_tiles.cuh"

namespace transformer_plugin::gemm::hopper {

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

// MXFP8: E4M3 under one E8M0 for 32 codes. A code's bits, put where bfloat16 has its own, are its value times 2^-120,
// subnormal ones too.
struct MxCodes {
  using Codes = uint4;                      // of a chunk
  static constexpr int kScaleShift = 5;     // a scale's codes, as a logarithm
  static constexpr float kLeftOver = 1.0f;  // what the values have yet to be multiplied by

  static __device__ __forceinline__ void decode(const Codes& codes, uint32_t scale, Values& values) {
    // 2^(scale - 127) * 2^120 may be past the largest number; the rest is multiplied by afterwards.
    constexpr uint32_t kLargest = 134;
    const uint32_t factor = twice(scale == 255 ? kNaN : (min(scale, kLargest) + 120) * kExponentOne);
    const uint32_t four[] = {codes.x, codes.y, codes.z, codes.w};
    uint32_t past = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t x = four[j];
      past |= after_magnitude(x);
      values[j * 2] = multiply_two((x << 8 & 0x80008000) | (x << 4 & 0x07f007f0), factor);
      values[j * 2 + 1] = multiply_two((x & 0x80008000) | (x >> 4 & 0x07f007f0), factor);
    }
    if ((past & 0x80808080) == 0 && scale <= kLargest) return;
    const uint32_t rest = twice((max(scale, kLargest) - kLargest + 127) * kExponentOne);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      past = after_magnitude(four[j]);
      values[j * 2] = multiply_two(values[j * 2], rest) | nan_of(past & 0x00000080, past & 0x00800000);
      values[j * 2 + 1] =
          multiply_two(values[j * 2 + 1], rest) | nan_of(past & 0x00008000, past & 0x80000000);
    }
  }

 private:
  // Has the highest bit of a byte where the code is NaN, S.1111.111.
  static __device__ __forceinline__ uint32_t after_magnitude(uint32_t x) {
    return (x & 0x7f7f7f7f) + 0x01010101;
  }
  static __device__ __forceinline__ uint32_t nan_of(uint32_t low, uint32_t high) {
    return (low ? kNaN : 0) | (high ? kNaN << 16 : 0);
  }
};

// NVFP4: E2M1 under one E4M3 for 16 codes; the amax of the whole stays outside. A code's bits, put where bfloat16 has its own,
// are its value times 2^-126. Scales are up to 448, so what is left over is 2^8.
struct NvCodes {
  using Codes = uint2;
  static constexpr int kScaleShift = 4;
  static constexpr float kLeftOver = 256.0f;

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

}  // namespace transformer_plugin::gemm::hopper
