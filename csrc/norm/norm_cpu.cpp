// RMSNorm and LayerNorm on a CPU: rows in parallel, columns vectorized.
#include "norm/norm_cpu.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "common/visit_float.h"

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

// The smallest power of two of partial sums that holds all columns: the others are zero and add nothing.
int64_t used_partials(int64_t cols) {
  int64_t count = kPartialSums;
  while (count / 2 >= cols && count > 1) count /= 2;
  return count;
}

// The sum of a power of two of terms, which are overwritten.
TP_CPU_CLONES float sum_of_neighbours(float* terms, int64_t count) {
  alignas(64) float other[kPartialSums / 2];
  float *from = terms, *to = other;
  for (; count > 1; count /= 2) {
    const float* __restrict in = from;
    float* __restrict out = to;
    for (int64_t i = 0; i < count / 2; ++i) out[i] = in[2 * i] + in[2 * i + 1];
    std::swap(from, to);
  }
  return from[0];
}

// Calls `add(first column, columns, partials)` for each kPartialSums columns and returns the sum.
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

template <typename T, bool kWeight, bool kBias>
TP_CPU_CLONES void normalise_columns(const T* input, const T* weight, const T* bias, bool zero_centered,
                                     RowStats stats, T* __restrict target, int64_t count) {
  for (int64_t c = 0; c < count; ++c) {
    float value = (static_cast<float>(input[c]) - stats.mean) * stats.rstd;
    if constexpr (kWeight) value = value * gamma_of(static_cast<float>(weight[c]), zero_centered);
    if constexpr (kBias) value = value + static_cast<float>(bias[c]);
    target[c] = static_cast<T>(value);
  }
}

// Calls fn with the two flags as constants.
template <typename Fn>
void visit_affine(const NormArgs& args, Fn&& fn) {
  using Yes = std::true_type;
  using No = std::false_type;
  if (args.weight) return args.bias ? fn(Yes{}, Yes{}) : fn(Yes{}, No{});
  args.bias ? fn(No{}, Yes{}) : fn(No{}, No{});
}

template <typename T>
const T* columns_of(const void* vector, int64_t first) {
  return vector ? static_cast<const T*>(vector) + first : nullptr;
}

template <typename T>
void normalise_row(const NormArgs& args, const RowStats& stats, const T* input, T* output) {
  visit_affine(args, [&](auto weight, auto bias) {
    normalise_columns<T, weight.value, bias.value>(input, columns_of<T>(args.weight, 0),
                                                   columns_of<T>(args.bias, 0), args.zero_centered, stats,
                                                   output, args.cols);
  });
}

// gamma and beta of the columns are converted once for all rows.
template <typename T, bool kWeight, bool kBias>
TP_CPU_CLONES void normalise_part(const T* input, int64_t stride, const T* weight, const T* bias,
                                  bool zero_centered, const RowStats* stats, int rows, int cols,
                                  float (*__restrict values)[quantize::kTile]) {
  alignas(64) float gammas[quantize::kTile], betas[quantize::kTile];
  for (int c = 0; kWeight && c < cols; ++c)
    gammas[c] = gamma_of(static_cast<float>(weight[c]), zero_centered);
  for (int c = 0; kBias && c < cols; ++c) betas[c] = static_cast<float>(bias[c]);
  for (int r = 0; r < rows; ++r, input += stride) {
    const RowStats of_row = stats[r];
    for (int c = 0; c < cols; ++c) {
      float value = (static_cast<float>(input[c]) - of_row.mean) * of_row.rstd;
      if constexpr (kWeight) value = value * gammas[c];
      if constexpr (kBias) value = value + betas[c];
      values[r][c] = static_cast<float>(static_cast<T>(value));
    }
  }
}

}  // namespace

float sum_of_partials_cpu(float* partials, int64_t cols) {
  return sum_of_neighbours(partials, used_partials(cols));
}

RowStats stats_of_row_cpu(const NormArgs& args, int64_t row) {
  RowStats stats{};
  visit_float(args.dtype, [&](auto element) { stats = stats_of_row<decltype(element)>(args, row); });
  if (args.mean) args.mean[row] = stats.mean;
  if (args.rstd) args.rstd[row] = stats.rstd;
  return stats;
}

void normalise_cpu(const NormArgs& args, const RowStats* stats, const Region& region,
                   quantize::FloatTile& values) {
  visit_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    visit_affine(args, [&](auto weight, auto bias) {
      normalise_part<T, weight.value, bias.value>(
          static_cast<const T*>(args.input) + region.row * args.cols + region.first, args.cols,
          columns_of<T>(args.weight, region.first), columns_of<T>(args.bias, region.first),
          args.zero_centered, stats, region.rows, region.cols, values.at);
    });
  });
}

void norm_cpu(const NormArgs& args, void* output) {
  const int64_t rows_per_task = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, args.cols));
  at::parallel_for(0, args.rows, rows_per_task, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const RowStats stats = stats_of_row_cpu(args, row);
      visit_float(args.dtype, [&](auto element) {
        using T = decltype(element);
        normalise_row(args, stats, static_cast<const T*>(args.input) + row * args.cols,
                      static_cast<T*>(output) + row * args.cols);
      });
    }
  });
}

}  // namespace transformer_plugin::norm
