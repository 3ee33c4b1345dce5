// E2M1, the 4-bit float: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, encoded as 0 to 7 and 8 to 15 (OCP
// Microscaling Formats (MX) v1.0, section 5.3.3). It has no infinity and no NaN: magnitudes above 6 become 6
// with their sign, NaN of either sign becomes +6. Zero keeps its sign. The same bits on CPU and CUDA.
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

// Bit 3 of the encoding. `value` is a product: on a GPU a NaN that results from arithmetic has sign 0.
TP_HOST_DEVICE uint32_t e2m1_sign(float value) {
  const uint32_t bits = float_to_bits(value);
#if defined(__CUDA_ARCH__)
  return (bits >> 28) & 8u;
#else
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0u : (bits >> 28) & 8u;
#endif
}

// The encoding of a magnitude p is its position min(2p, p + 2, p / 2 + 4) in the list of values, rounded to
// an integer. Adding 2^23 to a float leaves no room for a fraction, so the sum rounds to that integer in its
// last bits: once, because the products are exact.
inline constexpr float kE2m1Shift = 8388608.0f;
inline constexpr uint32_t kE2m1ShiftBits = 0x4b000000u;

// The nearest encoding of a magnitude up to 6, ties to even.
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

TP_HOST_DEVICE uint32_t e2m1_nearest(float value) {
  return e2m1_place(e2m1_magnitude(value)) | e2m1_sign(value);
}

// The position of a magnitude up to 6, in units of 1/256 of the step between its neighbours, rounded down.
TP_HOST_DEVICE uint32_t e2m1_fine_place(float p) {
  const uint32_t a = static_cast<uint32_t>(p * 512.0f), b = static_cast<uint32_t>(p * 256.0f) + 512u,
                 c = static_cast<uint32_t>(p * 128.0f) + 1024u;
  const uint32_t ab = a < b ? a : b;
  return ab < c ? ab : c;
}

// Stochastic rounding with byte `i` of `random`: the magnitude plus byte / 256 of the step between its
// neighbours, rounded down. Exact, because only whole units of 1/256 of a step matter.
TP_HOST_DEVICE uint32_t e2m1_stochastic(float value, uint32_t random, int i) {
  const uint32_t byte = (random >> (8 * i)) & 0xffu;
  return ((e2m1_fine_place(e2m1_magnitude(value)) + byte) >> 8) | e2m1_sign(value);
}

TP_HOST_DEVICE float e2m1_to_float(uint32_t code) {
  const uint32_t magnitude = code & 7u;
  const uint32_t bits = magnitude < 2u ? magnitude * 0x3f000000u : (magnitude + 252u) << 22;
  return bits_to_float(bits | (code & 8u) << 28);
}

}  // namespace transformer_plugin
