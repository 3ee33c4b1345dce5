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

// `add(first column, columns, partials)` for each kPartialSums columns, then the sum.
template <typename Add>
float sum_over_row(int64_t cols, Add&& add) {
  alignas(64) float partials[kPartialSums] = {};
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

template <typename T>
TP_CPU_CLONES void as_floats(const T* source, float* target, int64_t count) {
  for (int64_t c = 0; c < count; ++c) target[c] = static_cast<float>(source[c]);
}

template <typename T>
TP_CPU_CLONES void normalise_plain(const T* input, RowStats stats, float* values, int64_t count) {
  for (int64_t c = 0; c < count; ++c) values[c] = (static_cast<float>(input[c]) - stats.mean) * stats.rstd;
}

template <typename T>
TP_CPU_CLONES void multiply(const T* weight, bool zero_centered, float* values, int64_t count) {
  for (int64_t c = 0; c < count; ++c) {
    values[c] = values[c] * gamma_of(static_cast<float>(weight[c]), zero_centered);
  }
}

template <typename T>
TP_CPU_CLONES void add(const T* terms, float* values, int64_t count) {
  for (int64_t c = 0; c < count; ++c) values[c] = values[c] + static_cast<float>(terms[c]);
}

template <typename T>
TP_CPU_CLONES void round_to(const float* values, T* rounded, int64_t count) {
  for (int64_t c = 0; c < count; ++c) rounded[c] = static_cast<T>(values[c]);
}

constexpr int64_t kPiece = 512;  // columns that are normalised step by step while the cache holds them

template <typename T>
void normalise_piece(const NormArgs& args, const RowStats& stats, int64_t row, int64_t first, int64_t count,
                     float* values) {
  normalise_plain<T>(static_cast<const T*>(args.input) + row * args.cols + first, stats, values, count);
  if (args.weight) multiply<T>(static_cast<const T*>(args.weight) + first, args.zero_centered, values, count);
  if (args.bias) add<T>(static_cast<const T*>(args.bias) + first, values, count);
}

}  // namespace

float sum_of_partials_cpu(float* partials, int64_t cols) {
  int64_t count = kPartialSums;
  while (count / 2 >= cols && count > 1) count /= 2;  // what lies beyond is zero, and adds nothing
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
    using T = decltype(element);
    for (int64_t c = 0; c < count; c += kPiece) {
      T rounded[kPiece];
      const int64_t n = std::min(kPiece, count - c);
      normalise_piece<T>(args, stats, row, first + c, n, values + c);
      round_to<T>(values + c, rounded, n);
      as_floats<T>(rounded, values + c, n);
    }
  });
}

void norm_cpu(const NormArgs& args, void* output) {
  const int64_t rows_per_task = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, args.cols));
  at::parallel_for(0, args.rows, rows_per_task, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const RowStats stats = stats_of_row_cpu(args, row);
      visit_float(args.dtype, [&](auto element) {
        using T = decltype(element);
        for (int64_t c = 0; c < args.cols; c += kPiece) {
          float values[kPiece];
          const int64_t count = std::min(kPiece, args.cols - c);
          normalise_piece<T>(args, stats, row, c, count, values);
          round_to<T>(values, static_cast<T*>(output) + row * args.cols + c, count);
        }
      });
    }
  });
}

}  // namespace transformer_plugin::norm
