// The backward of the norms on a CPU: input gradients in parallel over rows, then column sums for weight and
// bias.
#include <ATen/Parallel.h>

#include <algorithm>

#include "common/visit_float.h"
#include "norm/norm_cpu.h"

namespace transformer_plugin::norm {
namespace {

constexpr int64_t kElementsPerTask = 16384;
constexpr int64_t kPiece = 512;

struct Row {
  float mean;
  float rstd;
};

Row row_of(const NormBackwardArgs& args, int64_t row) {
  return {args.mean ? args.mean[row] : 0.0f, args.rstd[row]};
}

// The gradient of the normalised values.
template <typename T>
TP_CPU_CLONES void scaled_gradient(const T* grad, const T* weight, bool zero_centered, float* scaled,
                                   int64_t count) {
  for (int64_t c = 0; c < count; ++c) {
    scaled[c] = static_cast<float>(grad[c]) * gamma_of(static_cast<float>(weight[c]), zero_centered);
  }
}

template <typename T>
TP_CPU_CLONES void as_floats(const T* source, float* target, int64_t count) {
  for (int64_t c = 0; c < count; ++c) target[c] = static_cast<float>(source[c]);
}

template <typename T>
TP_CPU_CLONES void add_terms(const float* scaled, const T* input, Row row, float* grads, float* products,
                             int64_t count) {
  for (int64_t c = 0; c < count; ++c) {
    const float normalised = (static_cast<float>(input[c]) - row.mean) * row.rstd;
    grads[c] = grads[c] + scaled[c];
    products[c] = products[c] + scaled[c] * normalised;
  }
}

template <typename T>
TP_CPU_CLONES void write_gradients(const float* scaled, const T* input, Row row, float mean_grad,
                                   float mean_product, T* grad_input, int64_t count) {
  for (int64_t c = 0; c < count; ++c) {
    const float normalised = (static_cast<float>(input[c]) - row.mean) * row.rstd;
    grad_input[c] = static_cast<T>(input_gradient(scaled[c], normalised, row.rstd, mean_grad, mean_product));
  }
}

template <typename T>
void input_gradient_of_row(const NormBackwardArgs& args, int64_t index) {
  const int64_t cols = args.cols, begin = index * cols;
  const T* grad = static_cast<const T*>(args.grad) + begin;
  const T* input = static_cast<const T*>(args.input) + begin;
  const T* weight = static_cast<const T*>(args.weight);
  const Row row = row_of(args, index);
  const auto scaled_at = [&](int64_t c, int64_t count, float* scaled) {
    weight ? scaled_gradient<T>(grad + c, weight + c, args.zero_centered, scaled, count)
           : as_floats<T>(grad + c, scaled, count);
  };
  alignas(64) float grads[kPartialSums] = {}, products[kPartialSums] = {}, scaled[kPiece];
  for (int64_t c = 0; c < cols; c += kPiece) {
    const int64_t count = std::min(kPiece, cols - c), partial = c % kPartialSums;
    scaled_at(c, count, scaled);
    add_terms<T>(scaled, input + c, row, grads + partial, products + partial, count);
  }
  const float n = static_cast<float>(cols);
  const float mean_grad = args.mean ? sum_of_partials_cpu(grads, cols) / n : 0.0f;
  const float mean_product = sum_of_partials_cpu(products, cols) / n;
  for (int64_t c = 0; c < cols; c += kPiece) {
    const int64_t count = std::min(kPiece, cols - c);
    scaled_at(c, count, scaled);
    write_gradients<T>(scaled, input + c, row, mean_grad, mean_product,
                       static_cast<T*>(args.grad_input) + begin + c, count);
  }
}

template <typename T>
TP_CPU_CLONES void products(const T* grad, const T* input, Row row, float* terms, int64_t count) {
  for (int64_t c = 0; c < count; ++c) {
    const float normalised = (static_cast<float>(input[c]) - row.mean) * row.rstd;
    terms[c] = static_cast<float>(grad[c]) * normalised;
  }
}

constexpr int64_t kColumnsAtOnce = 128;

// Column sums over all rows of the terms that `terms(row, column, columns, target)` computes.
template <typename Terms>
void sum_columns(const ColumnSums& sums, Terms&& terms) {
  if (!sums.sums) return;
  const int64_t parts = (sums.columns + kColumnsAtOnce - 1) / kColumnsAtOnce;
  at::parallel_for(0, sums.tiles(0) * parts, 1, [&](int64_t begin, int64_t end) {
    alignas(64) float values[kSumRows][kColumnsAtOnce];
    for (int64_t task = begin; task < end; ++task) {
      const RaggedTile tile = sums.tile(task / parts);
      const int64_t column = task % parts * kColumnsAtOnce;
      const int64_t count = std::min(kColumnsAtOnce, sums.columns - column);
      for (int64_t i = tile.begin; i < tile.end; ++i) terms(i, column, count, values[i - tile.begin]);
      sum_rows_cpu(values[0], kColumnsAtOnce, tile.end - tile.begin, count);
      std::copy_n(values[0], count, sums.of_tile(0, tile.begin) + column);
    }
  });
  add_tile_sums_cpu(sums);
}

}  // namespace

void norm_backward_cpu(const NormBackwardArgs& args) {
  visit_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t rows_per_task = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, args.cols));
    at::parallel_for(0, args.rows, rows_per_task, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) input_gradient_of_row<T>(args, row);
    });
    const T* grad = static_cast<const T*>(args.grad);
    const T* input = static_cast<const T*>(args.input);
    sum_columns(args.of_weight, [&](int64_t row, int64_t column, int64_t count, float* terms) {
      const int64_t first = row * args.cols + column;
      products<T>(grad + first, input + first, row_of(args, row), terms, count);
    });
    sum_columns(args.of_bias, [&](int64_t row, int64_t column, int64_t count, float* terms) {
      as_floats<T>(grad + row * args.cols + column, terms, count);
    });
  });
}

}  // namespace transformer_plugin::norm
