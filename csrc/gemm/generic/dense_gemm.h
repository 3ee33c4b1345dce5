// GEMM of two matrices through torch's kernels, rounded once.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace transformer_plugin::gemm {

// Accumulation dtype: float64 for float64 operands, otherwise float32.
inline at::ScalarType sum_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// A transposed view of a matrix, below autograd and without the dispatcher.
at::Tensor transposed_view(const at::Tensor& matrix);

// alpha * (a [M, K] @ b [K, N]) + bias [N], any strides. `alpha` is one float32.
at::Tensor dense_gemm(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias,
                      at::ScalarType dtype, const std::optional<at::Tensor>& alpha = std::nullopt);

// The same plus beta * out (beta is one float32; out is ignored where it is 0), or plus out with `accumulate`, stored
// to `out` [M, N] with inner stride 1. The version counter of `out` does not change.
void dense_gemm_out(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias,
                    const std::optional<at::Tensor>& alpha, const std::optional<at::Tensor>& beta,
                    const at::Tensor& out, bool accumulate = false);

// matrix [rows, columns] += bias [columns].
void add_bias_cpu(float* matrix, const float* bias, int64_t rows, int64_t columns);

}  // namespace transformer_plugin::gemm
