#include "norm/norm_cpu.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <utility>

namespace transformer_plugin::norm {
namespace {

constexpr int64_t kElementsPerTask = 16384;

template <typename T>
TP_CPU_CLONES void add_values(const T* input, float* partials, int64_t count) {
  for (int64_t c = 0; c < count; ++c) partials[c] = partials[c] + static_cast<float>(input[c]);
}

template <typename T>
TP_CPU_CLONES void add_squares(const T* input, float mean, float* partials, int64_t count) {
  for (int64_t c = 0; c < count; ++c) {
    const float difference = static_cast<float>(input[c]) - mean;
    partials[c] = fmaf(difference, difference, partials[c]);
  }
}

TP_CPU_CLONES void add_neighbours(const float* __restrict terms, float* __restrict sums, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sums[i] = terms[2 * i] + terms[2 * i + 1];
}

// A power of two that takes them all: what lies beyond is zero, and adds nothing.
int64_t used_partials(int64_t cols) {
  int64_t count = kPartialSums;
  while (count / 2 >= cols && count > 1) count /= 2;
  return count;
}

// `add(first column, columns, partials)` for each kPartialSums columns, then the sum.
template <typename Add>
float sum_over_row(int64_t cols, Add&& add) {
  alignas(64) float partials[kPartialSums];
  std::fill_n(partials, used_partials(cols), 0.0f);
  for (int64_t c = 0; c < cols; c += kPartialSums) {
    add(c, std::min<int64_t>(kPartialSums, cols - c), partials);
  }
  return sum_of_partials_cpu(partials, cols);
}

template <typename T>
RowStats stats_of_row(const NormArgs& args, int64_t row) {
  const T* input = static_cast<const T*>(args.input) + row * args.cols;
  const float count = static_cast<float>(args.cols);
  RowStats stats{0.0f, 0.0f};
  if (args.centered) {
    stats.mean = sum_over_row(args.cols, [&](int64_t c, int64_t n,
                                             float* partials) { add_values<T>(input + c, partials, n); }) /
                 count;
  }
  const float squares = sum_over_row(args.cols, [&](int64_t c, int64_t n, float* partials) {
    add_squares<T>(input + c, stats.mean, partials, n);
  });
  stats.rstd = reciprocal_root(squares / count, args.eps);
  return stats;
}

// Rounded to T, and given as Target.
template <typename T, bool kWeight, bool kBias, typename Target>
TP_CPU_CLONES void normalise_columns(const T* input, const T* weight, const T* bias, bool zero_centered,
                                     RowStats stats, Target* __restrict target, int64_t count) {
  for (int64_t c = 0; c < count; ++c) {
    float value = (static_cast<float>(input[c]) - stats.mean) * stats.rstd;
    if constexpr (kWeight) value = value * gamma_of(static_cast<float>(weight[c]), zero_centered);
    if constexpr (kBias) value = value + static_cast<float>(bias[c]);
    target[c] = static_cast<Target>(static_cast<T>(value));
  }
}

template <typename T, typename Target>
void normalise(const NormArgs& args, const RowStats& stats, int64_t row, int64_t first, int64_t count,
               Target* target) {
  const T* input = static_cast<const T*>(args.input) + row * args.cols + first;
  const T* weight = args.weight ? static_cast<const T*>(args.weight) + first : nullptr;
  const T* bias = args.bias ? static_cast<const T*>(args.bias) + first : nullptr;
  const auto columns =
      weight
          ? (bias ? normalise_columns<T, true, true, Target> : normalise_columns<T, true, false, Target>)
          : (bias ? normalise_columns<T, false, true, Target> : normalise_columns<T, false, false, Target>);
  columns(input, weight, bias, args.zero_centered, stats, target, count);
}

}  // namespace

float sum_of_partials_cpu(float* partials, int64_t cols) {
  int64_t count = used_partials(cols);
  float other[kPartialSums / 2];
  float *from = partials, *to = other;
  for (; count > 1; count /= 2) {
    add_neighbours(from, to, count / 2);
    std::swap(from, to);
  }
  return from[0];
}

RowStats stats_of_row_cpu(const NormArgs& args, int64_t row) {
  RowStats stats{};
  visit_float(args.dtype, [&](auto element) { stats = stats_of_row<decltype(element)>(args, row); });
  if (args.mean) args.mean[row] = stats.mean;
  if (args.rstd) args.rstd[row] = stats.rstd;
  return stats;
}

void normalise_cpu(const NormArgs& args, const RowStats& stats, int64_t row, int64_t first, int64_t count,
                   float* values) {
  visit_float(args.dtype, [&](auto element) {
    normalise<decltype(element), float>(args, stats, row, first, count, values);
  });
}

void norm_cpu(const NormArgs& args, void* output) {
  const int64_t rows_per_task = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, args.cols));
  at::parallel_for(0, args.rows, rows_per_task, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const RowStats stats = stats_of_row_cpu(args, row);
      visit_float(args.dtype, [&](auto element) {
        using T = decltype(element);
        normalise<T, T>(args, stats, row, 0, args.cols, static_cast<T*>(output) + row * args.cols);
      });
    }
  });
}

}  // namespace transformer_plugin::norm
