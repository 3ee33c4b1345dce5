// The random Hadamard transform on a CPU (quantize/cpu/hadamard.h).
#include "quantize/cpu/hadamard.h"

#include <type_traits>

#include "common/visit_float.h"
#include "quantize/args/quantize_nv.h"

namespace transformer_plugin::quantize {
namespace {

TP_CPU_CLONES void add_and_subtract(float* a, float* b, int rows) {
  for (int row = 0; row < rows; ++row) {
    const float sum = a[row] + b[row], difference = a[row] - b[row];
    a[row] = sum;
    b[row] = difference;
  }
}

// `factor` is a power of two or its negative, so that the product is exact.
TP_CPU_CLONES void scale(const float* from, int rows, float factor, float* to) {
  for (int row = 0; row < rows; ++row) to[row] = from[row] * factor;
}

// Rounds to nearest even. Integer code for bfloat16, which compilers vectorise.
template <typename T>
TP_CPU_CLONES void round_to(float* values, int rows) {
  for (int row = 0; row < rows; ++row) {
    if constexpr (std::is_same_v<T, c10::BFloat16>) {
      const uint32_t bits = float_to_bits(values[row]);
      const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
      values[row] = bits_to_float((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : rounded);
    } else {
      values[row] = static_cast<float>(static_cast<T>(values[row]));
    }
  }
}

}  // namespace

void hadamard_cpu(const float (*values)[kTile], int rows, DType dtype, Chunk& output) {
  // The transform divides by 4. For 16-bit values the division comes first: it is exact, and it keeps the
  // sums of the largest finite values finite. For float32, whose smallest values it would not be exact for,
  // it comes last.
  const float first = dtype == DType::kFloat32 ? 1.0f : 0.25f;
  for (int i = 0; i < kNvBlock; ++i) scale(values[i], rows, nv_is_negated(i) ? -first : first, output.at[i]);
  for (int stride = 1; stride < kNvBlock; stride *= 2) {
    for (int i = 0; i < kNvBlock; ++i) {
      if (!(i & stride)) add_and_subtract(output.at[i], output.at[i + stride], rows);
    }
  }
  visit_float(dtype, [&](auto type) {
    for (int i = 0; i < kNvBlock; ++i) {
      if (first != 0.25f) scale(output.at[i], rows, 0.25f, output.at[i]);
      round_to<decltype(type)>(output.at[i], rows);
    }
  });
}

}  // namespace transformer_plugin::quantize
