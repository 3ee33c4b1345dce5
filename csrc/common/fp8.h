// The two 8-bit float types, with conversions for a CPU.
//
// E4M3 (torch.float8_e4m3fn): 4 exponent bits of bias 7, 3 mantissa bits, largest 448, no infinity, NaN 0x7F.
// E5M2 (torch.float8_e5m2): 5 exponent bits of bias 15, 2 mantissa bits, largest finite 57344, infinity 0x7C.
// Conversions round to nearest, ties to even, and saturate: infinity becomes the largest finite value with
// its sign, NaN of either sign becomes 0x7F. CUDA kernels use cvt.rn.satfinite, which does the same
// (quantize/cuda/tile/common.cuh).
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
  static constexpr float kLargest = 448.0f;
};

template <>
struct Fp8Traits<DType::kFloat8E5M2> {
  static constexpr int kMantissaBits = 2;
  static constexpr int kBias = 15;
  static constexpr float kLargest = 57344.0f;
};

// Largest finite value.
template <DType element>
TP_HOST_DEVICE constexpr float largest_fp8() {
  return Fp8Traits<element>::kLargest;
}

// Branch-free, so that compilers vectorise it. Adding the power of two whose last mantissa bit has the weight
// of the result's last bit rounds to it; the part of the sum above that power is the result in units of its
// last bit.
template <DType element>
TP_HOST_DEVICE uint8_t float_to_fp8(float value) {
  using Traits = Fp8Traits<element>;
  constexpr int shift = 23 - Traits::kMantissaBits;
  constexpr uint32_t smallest_normal = static_cast<uint32_t>(128 - Traits::kBias) << 23;
  constexpr uint32_t to_grid = static_cast<uint32_t>(shift) << 23;
  constexpr uint32_t grid_of_smallest = (smallest_normal + to_grid) >> shift;
  const uint32_t bits = float_to_bits(value);
  const float magnitude = bits_to_float(bits & 0x7fffffffu);
  const float finite = magnitude < largest_fp8<element>() ? magnitude : largest_fp8<element>();
  const uint32_t exponent = float_to_bits(finite) & 0x7f800000u;
  const uint32_t grid = (exponent > smallest_normal ? exponent : smallest_normal) + to_grid;
  const uint32_t units = float_to_bits(finite + bits_to_float(grid)) - grid;
  const uint32_t code = units + (grid >> shift) - grid_of_smallest;
  return static_cast<uint8_t>(value != value ? 0x7Fu : code | ((bits >> 24) & 0x80u));
}

// Exact. NaN becomes 0x7FC00000 regardless of its sign.
template <DType element>
TP_HOST_DEVICE float fp8_to_float(uint8_t code) {
  using Traits = Fp8Traits<element>;
  constexpr int shift = 23 - Traits::kMantissaBits;
  constexpr float smallest_normal = 2.0f / static_cast<float>(1u << Traits::kBias);
  const uint32_t magnitude = code & 0x7Fu;
  // A subnormal decoded with an implicit leading one is too large by that one.
  const bool is_subnormal = (magnitude >> Traits::kMantissaBits) == 0;
  const uint32_t normal = (magnitude << shift) + (static_cast<uint32_t>(127 - Traits::kBias) << 23);
  const float with_one = bits_to_float(normal + (is_subnormal ? 1u << 23 : 0u));
  uint32_t bits = float_to_bits(with_one - (is_subnormal ? smallest_normal : 0.0f));
  if constexpr (element == DType::kFloat8E5M2) bits = magnitude == 0x7Cu ? 0x7f800000u : bits;
  bits |= static_cast<uint32_t>(code & 0x80u) << 24;
  const bool is_nan = element == DType::kFloat8E5M2 ? magnitude > 0x7Cu : magnitude == 0x7Fu;
  return bits_to_float(is_nan ? 0x7fc00000u : bits);
}

// Calls fn with the element as a std::integral_constant.
template <typename Fn>
void visit_fp8(DType element, Fn&& fn) {
  if (element == DType::kFloat8E5M2) return fn(std::integral_constant<DType, DType::kFloat8E5M2>{});
  return fn(std::integral_constant<DType, DType::kFloat8E4M3>{});
}

}  // namespace transformer_plugin
