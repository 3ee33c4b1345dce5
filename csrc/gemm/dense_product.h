// The product of two matrices through torch's own kernels, rounded once.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace transformer_plugin::gemm {

// float64 for float64 operands, else float32: what sums are kept in.
inline at::ScalarType sum_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// A view of a matrix with its dimensions swapped, below autograd and without the dispatcher's cost.
at::Tensor transposed_view(const at::Tensor& matrix);

// a [M, K] times b [K, N] plus bias [N]; any strides. `alpha` (one float32) scales the sum before the bias.
at::Tensor dense_product(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias,
                         at::ScalarType dtype, const std::optional<at::Tensor>& alpha = std::nullopt);

// matrix [rows, columns] += bias [columns].
void add_bias_cpu(float* matrix, const float* bias, int64_t rows, int64_t columns);

}  // namespace transformer_plugin::gemm
