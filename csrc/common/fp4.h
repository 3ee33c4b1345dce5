// E2M1, the 4-bit float: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, codes 0 to 7 and 8 to 15 (OCP Microscaling
// Formats (MX) v1.0, section 5.3.3). No infinity and no NaN: what is larger than 6 becomes 6 with its sign, NaN of
// either sign +6. Zero keeps its sign. The same bits on CPU and CUDA.
#pragma once

#include <cstdint>

#include "common/math.h"

namespace transformer_plugin {

// |value| up to 6; 6 for NaN.
TP_HOST_DEVICE float e2m1_magnitude(float value) {
#if defined(__CUDA_ARCH__)
  return fminf(fabsf(value), 6.0f);
#else
  const float magnitude = bits_to_float(float_to_bits(value) & 0x7fffffffu);
  return magnitude < 6.0f ? magnitude : 6.0f;
#endif
}

// Bit 3 of a code. `value` is a product: on a GPU a NaN that comes out of arithmetic is the one with sign 0.
TP_HOST_DEVICE uint32_t e2m1_sign(float value) {
  const uint32_t bits = float_to_bits(value);
#if defined(__CUDA_ARCH__)
  return (bits >> 28) & 8u;
#else
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0u : (bits >> 28) & 8u;
#endif
}

// Codes are read off the last bits of a float that has no room for a fraction: a magnitude p has the place
// min(2p, p + 2, p / 2 + 4) among them, and adding 2^23 rounds that to an integer, once, for the products are exact.
inline constexpr float kE2m1Shift = 8388608.0f;
inline constexpr uint32_t kE2m1ShiftBits = 0x4b000000u;

// The nearest code of a magnitude up to 6, ties to the even one.
TP_HOST_DEVICE uint32_t e2m1_place(float p) {
#if defined(__CUDA_ARCH__)
  const float a = fmaf(p, 2.0f, kE2m1Shift), b = p + (kE2m1Shift + 2.0f),
              c = fmaf(p, 0.5f, kE2m1Shift + 4.0f);
  return float_to_bits(fminf(fminf(a, b), c)) - kE2m1ShiftBits;
#else
  const float a = p * 2.0f + kE2m1Shift, b = p + (kE2m1Shift + 2.0f), c = p * 0.5f + (kE2m1Shift + 4.0f);
  const float ab = a < b ? a : b;
  return float_to_bits(ab < c ? ab : c) - kE2m1ShiftBits;
#endif
}

// The code at or below a magnitude under 8.
TP_HOST_DEVICE uint32_t e2m1_place_below(float p) {
#if defined(__CUDA_ARCH__)
  const float a = __fmaf_rd(p, 2.0f, kE2m1Shift), b = __fadd_rd(p, kE2m1Shift + 2.0f),
              c = __fmaf_rd(p, 0.5f, kE2m1Shift + 4.0f);
  return float_to_bits(fminf(fminf(a, b), c)) - kE2m1ShiftBits;
#else
  // From 1 on a code is the first mantissa bit under the exponent; below there are only 0.5 and 0.
  const int32_t normal = static_cast<int32_t>(float_to_bits(p) >> 22) - 252;
  const int32_t half = p >= 0.5f ? 1 : 0;
  return static_cast<uint32_t>(normal > half ? normal : half);
#endif
}

TP_HOST_DEVICE uint32_t e2m1_nearest(float value) {
  return e2m1_place(e2m1_magnitude(value)) | e2m1_sign(value);
}

// Stochastic rounding by byte `i` of `random`: the magnitude plus byte / 256 of the step between its neighbours, rounded
// down. All but the sum is exact.
TP_HOST_DEVICE uint32_t e2m1_stochastic(float value, uint32_t random, int i) {
  const float p = e2m1_magnitude(value);
  const uint32_t exponent = float_to_bits(p) & 0x7f800000u;
  const float double_step = bits_to_float(exponent > 0x3f800000u ? exponent : 0x3f800000u);
#if defined(__CUDA_ARCH__)
  const float byte = bits_to_float(__byte_perm(random, kE2m1ShiftBits, 0x7440u + i)) - kE2m1Shift;
  const float moved = fmaf(byte, double_step * (1.0f / 512.0f), p);
#else
  const float byte = bits_to_float(kE2m1ShiftBits | ((random >> (8 * i)) & 0xffu)) - kE2m1Shift;
  const float moved = p + byte * (double_step * (1.0f / 512.0f));
#endif
  return e2m1_place_below(moved) | e2m1_sign(value);
}

TP_HOST_DEVICE float e2m1_to_float(uint32_t code) {
  const uint32_t magnitude = code & 7u;
  const uint32_t bits = magnitude < 2u ? magnitude * 0x3f000000u : (magnitude + 252u) << 22;
  return bits_to_float(bits | (code & 8u) << 28);
}

}  // namespace transformer_plugin
