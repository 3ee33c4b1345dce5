// What the forward of grouped_mlp saves for its backward.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <array>

#include "linear/grouped_mlp_activation.h"
#include "linear/operand_formats.h"

namespace transformer_plugin::linear {

struct SavedTensors {
  // Columnwise, for the weight gradients.
  Quantized input, activation;
  // The weights, for the data gradients.
  Quantized fc1, fc2;
  at::Tensor fc1_out;
  at::Tensor group_sizes, probs;  // one for each row
  // Where it contributes to the gradient of `probs`.
  at::Tensor fc2_bias;
  TokenRows rows;
  SavedRankExchange ranks;
  // Of weights that are several matrices without scales.
  torch::autograd::variable_list fc1_matrices, fc2_matrices;

  // With the formats and layouts of the operands, and all that the backward reads of the arguments but buffers and shards.
  void save(torch::autograd::AutogradContext* ctx, const MlpArguments& mlp, const OperandFormats& formats);
  static SavedTensors of(torch::autograd::AutogradContext* ctx, const OperandFormats& formats);

 private:
  static constexpr size_t kBeforeMatrices = 20;

  // In the order in which they are saved.
  std::array<at::Tensor*, kBeforeMatrices> before_matrices();
  torch::autograd::variable_list pack();
  // `fc1_count`, `fc2_count`: how many matrices of each weight were saved.
  static SavedTensors unpack(const torch::autograd::variable_list& list, size_t fc1_count, size_t fc2_count);
};

OperandFormats saved_formats(torch::autograd::AutogradContext* ctx, const char* op);
// How many tensors each weight is.
size_t saved_fc1_count(torch::autograd::AutogradContext* ctx);
size_t saved_fc2_count(torch::autograd::AutogradContext* ctx);
// Whether the forward made the quantized weight: without a scale it is the parameter; otherwise it may be the caller's.
bool quantized_fc1_in_forward(torch::autograd::AutogradContext* ctx, const SavedTensors& kept);
bool quantized_fc2_in_forward(torch::autograd::AutogradContext* ctx, const SavedTensors& kept);

}  // namespace transformer_plugin::linear
