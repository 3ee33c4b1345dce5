#include "quantize/hadamard_cpu.h"

#include <algorithm>
#include <type_traits>

#include "quantize/quantize_nv.h"

namespace transformer_plugin::quantize {
namespace {

TP_CPU_CLONES void add_and_subtract(float* a, float* b) {
  for (int line = 0; line < kTile; ++line) {
    const float sum = a[line] + b[line], difference = a[line] - b[line];
    a[line] = sum;
    b[line] = difference;
  }
}

// A quarter, rounded to nearest even. In integers for bfloat16, which compilers vectorise.
template <typename T>
TP_CPU_CLONES void quarter(float* values) {
  for (int line = 0; line < kTile; ++line) {
    const float value = values[line] * 0.25f;
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      const uint32_t bits = float_to_bits(value);
      const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
      values[line] = bits_to_float((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : rounded);
    } else {
      values[line] = static_cast<float>(static_cast<T>(value));
    }
  }
}

TP_CPU_CLONES void negate(const float* from, float* to) {
  for (int line = 0; line < kTile; ++line) to[line] = -from[line];
}

}  // namespace

void hadamard_cpu(const float (*values)[kTile], DType dtype, Chunk& turned) {
  for (int i = 0; i < kNvBlock; ++i) {
    if (nv_is_negated(i)) {
      negate(values[i], turned.at[i]);
    } else {
      std::copy_n(values[i], kTile, turned.at[i]);
    }
  }
  for (int stride = 1; stride < kNvBlock; stride *= 2) {
    for (int i = 0; i < kNvBlock; ++i) {
      if (!(i & stride)) add_and_subtract(turned.at[i], turned.at[i + stride]);
    }
  }
  visit_float(dtype, [&](auto type) {
    for (int i = 0; i < kNvBlock; ++i) quarter<decltype(type)>(turned.at[i]);
  });
}

}  // namespace transformer_plugin::quantize
