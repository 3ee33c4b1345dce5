// E8M0, the scale type of the microscaling formats: 8 exponent bits, 2^(e - 127), 0xFF is NaN (OCP
// Microscaling Formats (MX) v1.0, section 5.4.1). The same bits on CPU and CUDA.
#pragma once

#include <cstdint>

#include "common/math.h"

namespace transformer_plugin {

// The exponent of the smallest power of two that is not below amax / largest, so that no element of the block
// overflows: the exponent of amax * (1 / largest), rounded up (NVIDIA TransformerEngine's rule). 0 for 0.
TP_HOST_DEVICE uint8_t e8m0_of_amax(float amax, float largest) {
  const uint32_t bits = float_to_bits(amax * (1.0f / largest));
  const uint32_t exponent = bits >> 23;
  const uint32_t mantissa = bits & 0x7fffffu;
  if (exponent == 0xffu) return static_cast<uint8_t>(mantissa != 0 ? 0xffu : 0xfeu);
  if (exponent == 0) return static_cast<uint8_t>(mantissa > 0x400000u ? 1u : 0u);  // 2^-127 is 0x400000
  return static_cast<uint8_t>(exponent + (mantissa != 0 && exponent != 0xfeu ? 1u : 0u));
}

// 2^(127 - e), the multiplier of elements before they are rounded.
TP_HOST_DEVICE float e8m0_multiplier(uint8_t code) {
  if (code == 0xffu) return bits_to_float(0x7fc00000u);
  if (code == 0xfeu) return bits_to_float(0x00400000u);
  return bits_to_float((254u - code) << 23);
}

// 2^(e - 127).
TP_HOST_DEVICE float e8m0_to_float(uint8_t code) {
  if (code == 0xffu) return bits_to_float(0x7fc00000u);
  return bits_to_float(code == 0 ? 0x00400000u : static_cast<uint32_t>(code) << 23);
}

}  // namespace transformer_plugin
