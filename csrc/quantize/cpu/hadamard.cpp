#include "quantize/cpu/hadamard.h"

#include <type_traits>

#include "quantize/args/quantize_nv.h"

namespace transformer_plugin::quantize {
namespace {

TP_CPU_CLONES void add_and_subtract(float* a, float* b, int lines) {
  for (int line = 0; line < lines; ++line) {
    const float sum = a[line] + b[line], difference = a[line] - b[line];
    a[line] = sum;
    b[line] = difference;
  }
}

// Times a power of two or its negative.
TP_CPU_CLONES void scale(const float* from, int lines, float factor, float* to) {
  for (int line = 0; line < lines; ++line) to[line] = from[line] * factor;
}

// Rounded to nearest even. In integers for bfloat16, which compilers vectorise.
template <typename T>
TP_CPU_CLONES void round_to(float* values, int lines) {
  for (int line = 0; line < lines; ++line) {
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      const uint32_t bits = float_to_bits(values[line]);
      const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
      values[line] = bits_to_float((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : rounded);
    } else {
      values[line] = static_cast<float>(static_cast<T>(values[line]));
    }
  }
}

}  // namespace

void hadamard_cpu(const float (*values)[kTile], int lines, DType dtype, Chunk& turned) {
  // The quarter comes before the sums of 16-bit values, of which it is exact, and keeps those of the largest finite; after
  // them of floats, which have no room below their least.
  const float first = dtype == DType::kFloat32 ? 1.0f : 0.25f;
  for (int i = 0; i < kNvBlock; ++i) scale(values[i], lines, nv_is_negated(i) ? -first : first, turned.at[i]);
  for (int stride = 1; stride < kNvBlock; stride *= 2) {
    for (int i = 0; i < kNvBlock; ++i) {
      if (!(i & stride)) add_and_subtract(turned.at[i], turned.at[i + stride], lines);
    }
  }
  visit_float(dtype, [&](auto type) {
    for (int i = 0; i < kNvBlock; ++i) {
      if (first != 0.25f) scale(turned.at[i], lines, 0.25f, turned.at[i]);
      round_to<decltype(type)>(turned.at[i], lines);
    }
  });
}

}  // namespace transformer_plugin::quantize
