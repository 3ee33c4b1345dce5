// Calls of the op linear through the dispatcher.
#pragma once

#include "common/ops/linear.h"
#include "common/tensor.h"
#include "linear/operands.h"
#include "linear/weights.h"

namespace transformer_plugin::linear {

inline at::Tensor call_linear(const at::Tensor& input, const at::Tensor& weight,
                              const std::optional<at::Tensor>& bias, const OperandFormats& formats,
                              const OptionalList& quantized_weight, const MainGrad& main_grad,
                              bool save_original_input, const sharded::WeightShard& shard) {
  const auto buffer = main_grad.buffers ? std::optional((*main_grad.buffers)[0]) : std::nullopt;
  return ops::linear(input, weight, bias, formats.input_key, formats.weight_key, formats.grad_key,
                     quantized_weight, buffer, main_grad.accumulate, main_grad.weight_grad, main_grad.queue,
                     save_original_input, std::nullopt, shard.key, 1, "");
}

}  // namespace transformer_plugin::linear
