// The product of two matrices through torch's own kernels, rounded once.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace transformer_plugin::gemm {

// float64 for float64 operands, else float32: what sums are kept in.
inline at::ScalarType sum_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// Whether a [M, K] times b [K, N] is faster as a product of float32 copies than by torch's kernel of their dtype:
// bfloat16 on an x86 CPU without instructions for it (AMX, AVX512-BF16), where torch reaches 0.6 of its float32 rate;
// with them it reaches twice that rate. Either way the sum is kept in FP32 and rounded once.
bool faster_in_float32(const at::Tensor& a, const at::Tensor& b);

// A view of a matrix with its dimensions swapped, below autograd and without the dispatcher's cost.
at::Tensor transposed_view(const at::Tensor& matrix);

// a [M, K] times b [K, N] plus bias [N]; any strides. `alpha` (one float32) scales the sum before the bias.
at::Tensor dense_gemm(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias,
                      at::ScalarType dtype, const std::optional<at::Tensor>& alpha = std::nullopt);

// The same into `out` [M, N], plus beta (one float32) times what it holds, which counts for nothing where beta is 0. Its inner
// stride is 1; its version does not change.
void dense_gemm_out(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias,
                    const std::optional<at::Tensor>& alpha, const std::optional<at::Tensor>& beta,
                    const at::Tensor& out);

// matrix [rows, columns] += bias [columns].
void add_bias_cpu(float* matrix, const float* bias, int64_t rows, int64_t columns);

}  // namespace transformer_plugin::gemm
