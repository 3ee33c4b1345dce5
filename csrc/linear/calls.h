// Calls of the op linear through the dispatcher.
#pragma once

#include "common/tensor.h"
#include "linear/operands.h"
#include "linear/weights.h"

namespace transformer_plugin::linear {

using LinearSignature = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                                   std::string_view, std::string_view, std::string_view, OptionalList,
                                   const std::optional<at::Tensor>&, bool, std::string_view,
                                   const std::optional<at::Tensor>&, bool, const std::optional<at::Tensor>&,
                                   std::string_view, int64_t, std::string_view);

inline at::Tensor call_linear(const at::Tensor& input, const at::Tensor& weight,
                              const std::optional<at::Tensor>& bias, const OperandFormats& formats,
                              const OptionalList& quantized_weight, const MainGrad& main_grad,
                              bool save_original_input) {
  static const auto op = find_op<LinearSignature>("linear");
  const auto buffer = main_grad.buffers ? std::optional((*main_grad.buffers)[0]) : std::nullopt;
  return op.call(input, weight, bias, formats.input_key, formats.weight_key, formats.grad_key,
                 quantized_weight, buffer, main_grad.accumulate, main_grad.weight_grad, main_grad.queue,
                 save_original_input, std::nullopt, main_grad.weight_shard, 1, "");
}

}  // namespace transformer_plugin::linear
