// The products of a layer from quantized or plain operands (linear/operands.h).
#pragma once

#include "linear/operands.h"

namespace transformer_plugin::linear {

// a @ b, or a @ b^T; for each group if group sizes are given. `matrices`: read in place of the data of `b`, if there are any.
// With `out`, [M, N] or [..., N], it is written there, and `out` is the result. Without `zero_tail` rows past the last group are
// not written.
at::Tensor gemm_of(const Quantized& a, const Quantized& b, const std::optional<at::Tensor>& group_sizes,
                   const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& bias_scale,
                   bool transpose_b, at::ScalarType dtype, const gemm::LaunchOptions& options = {},
                   at::TensorList matrices = {}, const std::optional<at::Tensor>& out = std::nullopt,
                   bool zero_tail = true);
// The operand as an op that writes an argument takes it. While a graph is traced E8M0 scales become bytes.
Quantized as_traceable(const Quantized& operand);
// grad^T @ input from columnwise operands: [N, K], or [G, N, K].
at::Tensor wgrad_of(const Quantized& grad, const Quantized& input,
                    const std::optional<at::Tensor>& group_sizes, at::ScalarType dtype,
                    const gemm::LaunchOptions& options = {});
// The same added to `out`, or written over it: one tensor of these sizes, or G matrices [N, K].
void wgrad_into(const Quantized& grad, const Quantized& input, const std::optional<at::Tensor>& group_sizes,
                at::TensorList out, bool accumulate, const gemm::LaunchOptions& options = {});

}  // namespace transformer_plugin::linear
