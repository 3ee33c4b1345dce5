// The products of a layer from quantized or plain operands (linear/operands.h).
#pragma once

#include "linear/no_tensor.h"
#include "linear/operands.h"

namespace transformer_plugin::linear {

// a @ b^T + bias * bias_scale, or a @ b + ...; for each group if group sizes are given. Lives as long as the call.
struct GemmCall {
  const Quantized& a;
  const Quantized& b;
  at::TensorList matrices = {};  // read in place of the data of `b`, if there are any
  const std::optional<at::Tensor>& group_sizes = kNoTensor;
  const std::optional<at::Tensor>& bias = kNoTensor;
  const std::optional<at::Tensor>& bias_scale = kNoTensor;
  bool transpose_b = true;
  at::ScalarType dtype;  // of the result
  gemm::LaunchOptions options = {};
  const std::optional<at::Tensor>& out = kNoTensor;  // [M, N] or [..., N]: written, and the result
  bool zero_tail = true;                             // whether rows past the last group are written, as zeros
};
at::Tensor gemm_of(const GemmCall& call);
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
