#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

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

// What reaches the normalised values.
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
TP_CPU_CLONES void add_products(const T* grad, const T* input, Row row, float* sums, int64_t count) {
  for (int64_t c = 0; c < count; ++c) {
    const float normalised = (static_cast<float>(input[c]) - row.mean) * row.rstd;
    sums[c] = sums[c] + static_cast<float>(grad[c]) * normalised;
  }
}

template <typename T>
TP_CPU_CLONES void add_row(const T* values, float* sums, int64_t count) {
  for (int64_t c = 0; c < count; ++c) sums[c] = sums[c] + static_cast<float>(values[c]);
}

template <typename T>
void sum_chunk(const NormBackwardArgs& args, int64_t chunk) {
  const int64_t cols = args.cols;
  float* of_weight = args.grad_weight ? args.partial_of_weight() + chunk * cols : nullptr;
  float* of_bias = args.grad_bias ? args.partial_of_bias() + chunk * cols : nullptr;
  if (of_weight) std::fill_n(of_weight, cols, 0.0f);
  if (of_bias) std::fill_n(of_bias, cols, 0.0f);
  const int64_t end = std::min(args.rows, (chunk + 1) * kRowChunk);
  for (int64_t row = chunk * kRowChunk; row < end; ++row) {
    const T* grad = static_cast<const T*>(args.grad) + row * cols;
    const T* input = static_cast<const T*>(args.input) + row * cols;
    if (of_weight) add_products<T>(grad, input, row_of(args, row), of_weight, cols);
    if (of_bias) add_row<T>(grad, of_bias, cols);
  }
}

template <typename T>
void add_chunks(const NormBackwardArgs& args, const float* partial, void* target) {
  std::vector<float> sums(args.cols, 0.0f);
  for (int64_t chunk = 0; chunk < args.chunks(); ++chunk) {
    add_row<float>(partial + chunk * args.cols, sums.data(), args.cols);
  }
  for (int64_t c = 0; c < args.cols; ++c) static_cast<T*>(target)[c] = static_cast<T>(sums[c]);
}

}  // namespace

void norm_backward_cpu(const NormBackwardArgs& args) {
  visit_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t rows_per_task = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, args.cols));
    at::parallel_for(0, args.rows, rows_per_task, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) input_gradient_of_row<T>(args, row);
    });
    if (!args.grad_weight && !args.grad_bias) return;
    at::parallel_for(0, args.chunks(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) sum_chunk<T>(args, chunk);
    });
    if (args.grad_weight) add_chunks<T>(args, args.partial_of_weight(), args.grad_weight);
    if (args.grad_bias) add_chunks<T>(args, args.partial_of_bias(), args.grad_bias);
  });
}

}  // namespace transformer_plugin::norm
