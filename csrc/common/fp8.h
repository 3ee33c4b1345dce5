// The two 8-bit floats, bit by bit, on a CPU.
//
// E4M3 (torch.float8_e4m3fn): 4 exponent bits of bias 7, 3 mantissa bits, largest 448, no infinity, NaN 0x7F.
// E5M2 (torch.float8_e5m2): 5 exponent bits of bias 15, 2 mantissa bits, largest finite 57344, infinity 0x7C.
// Rounding to them is to nearest, ties to even, saturating: infinities become the largest finite value with
// their sign, NaN of either sign becomes 0x7F. cvt.rn.satfinite of sm_89 and later does the same: CUDA kernels use it
// (quantize/quantize_device.cuh).
#pragma once

#include <type_traits>

#include "common/dtype.h"
#include "common/math.h"

namespace transformer_plugin {

template <DType element>
struct Fp8Traits;

template <>
struct Fp8Traits<DType::kFloat8E4M3> {
  static constexpr int kMantissaBits = 3;
  static constexpr int kBias = 7;
  static constexpr uint32_t kLargest = 0x7E;
};

template <>
struct Fp8Traits<DType::kFloat8E5M2> {
  static constexpr int kMantissaBits = 2;
  static constexpr int kBias = 15;
  static constexpr uint32_t kLargest = 0x7B;
};

// The portable conversion: no branch, so that a compiler can vectorise it.
template <DType element>
TP_HOST_DEVICE uint8_t float_to_fp8(float value) {
  using Traits = Fp8Traits<element>;
  constexpr int shift = 23 - Traits::kMantissaBits;
  constexpr uint32_t smallest_normal = static_cast<uint32_t>(128 - Traits::kBias) << 23;
  // Adding a power of two whose last mantissa bit weighs as much as the smallest subnormal rounds to that
  // grid.
  constexpr uint32_t grid = static_cast<uint32_t>(127 + 24 - Traits::kBias - Traits::kMantissaBits) << 23;
  const uint32_t bits = float_to_bits(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t subnormal = float_to_bits(bits_to_float(magnitude) + bits_to_float(grid)) - grid;
  const uint32_t nearest = magnitude + ((1u << (shift - 1)) - 1u) + ((magnitude >> shift) & 1u);
  const uint32_t normal =
      (nearest >> shift) - (static_cast<uint32_t>(127 - Traits::kBias) << Traits::kMantissaBits);
  uint32_t code = magnitude < smallest_normal ? subnormal : normal;
  code = code > Traits::kLargest ? Traits::kLargest : code;
  code |= (bits >> 24) & 0x80u;
  return static_cast<uint8_t>(magnitude > 0x7f800000u ? 0x7Fu : code);
}

// Exact. NaN comes out as 0x7FC00000 whatever its sign was.
template <DType element>
TP_HOST_DEVICE float fp8_to_float(uint8_t code) {
  using Traits = Fp8Traits<element>;
  constexpr float smallest = 1.0f / static_cast<float>(1u << (Traits::kBias + Traits::kMantissaBits - 1));
  const uint32_t magnitude = code & 0x7Fu;
  const uint32_t normal =
      (magnitude << (23 - Traits::kMantissaBits)) + (static_cast<uint32_t>(127 - Traits::kBias) << 23);
  const bool is_subnormal = (magnitude >> Traits::kMantissaBits) == 0;
  uint32_t bits =
      is_subnormal ? float_to_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * smallest) : normal;
  if constexpr (element == DType::kFloat8E5M2) bits = magnitude == 0x7Cu ? 0x7f800000u : bits;
  bits |= static_cast<uint32_t>(code & 0x80u) << 24;
  const bool is_nan = element == DType::kFloat8E5M2 ? magnitude > 0x7Cu : magnitude == 0x7Fu;
  return bits_to_float(is_nan ? 0x7fc00000u : bits);
}

// Largest finite value.
template <DType element>
TP_HOST_DEVICE constexpr float largest_fp8() {
  return element == DType::kFloat8E5M2 ? 57344.0f : 448.0f;
}

// Calls fn with a std::integral_constant of the element, for either of the two.
template <typename Fn>
void visit_fp8(DType element, Fn&& fn) {
  if (element == DType::kFloat8E5M2) return fn(std::integral_constant<DType, DType::kFloat8E5M2>{});
  return fn(std::integral_constant<DType, DType::kFloat8E4M3>{});
}

}  // namespace transformer_plugin
