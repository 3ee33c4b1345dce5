// The first half of grouped_mlp, fc1 and the activation times a probability per row, and of its backward.
#pragma once

#include "activation/description.h"
#include "linear/caller_buffers.h"
#include "linear/operands.h"
#include "linear/rank_exchange.h"
#include "linear/token_rows.h"
#include "linear/weight_source.h"

namespace transformer_plugin::linear {

struct MlpArguments {
  const char* op;
  const at::Tensor& input;                    // [T, H]; with `rows` or `ranks` the tokens
  at::TensorList fc1_weight;                  // [G, 2F, H], without a gate [G, F, H]; or G matrices
  at::TensorList fc2_weight;                  // [G, H, F]; or G matrices
  const at::Tensor& group_sizes;              // [G]
  const at::Tensor& probs;                    // [T]; with `rows` [S], as the rows; with `ranks` [T, K]
  const std::optional<at::Tensor>& fc1_bias;  // [G, 2F], without a gate [G, F]
  const std::optional<at::Tensor>& fc2_bias;  // [G, H]
  // The weights as quantize_weight returned them (linear/quantized_weight.h), read instead of the weights.
  const std::optional<at::TensorList>&quantized_fc1, &quantized_fc2;
  activation::NamedActivation activation = {};
  gemm::LaunchOptions options = {};
  MainGrad fc1_main_grad = {}, fc2_main_grad = {};
  CallerBuffers buffers = {};
  TokenRows rows = {};
  // Of both weights.
  const sharded::WeightShard& shard = sharded::kUnsharded;
  // With it `rows` are of the tokens that this rank receives.
  RankExchange ranks = {};

  // What the experts of this rank compute, of the tokens that it has received and the probability of each row.
  MlpArguments of_received(const at::Tensor& tokens, const at::Tensor& row_probs) const {
    return {op,       tokens,        fc1_weight,    fc2_weight, group_sizes, row_probs,     fc1_bias,
            fc2_bias, quantized_fc1, quantized_fc2, activation, options,     fc1_main_grad, fc2_main_grad,
            buffers,  rows,          shard};
  }
  // The rows of the groups.
  const at::Tensor& sized_as_rows() const { return rows.given() ? rows.source : input; }
  // Whether the rows past the last group are zero in what the steps compute. With `rows` nothing reads them, and the time follows
  // the rows of groups.
  bool zero_tail() const { return !rows.given(); }
};

struct Hidden {
  at::Tensor fc1_out;           // [T, 2F] or [T, F], with its bias, its columns as the rows of the weight
  QuantizedOperand activation;  // [T, F], in the format of fc2's input
};

// Whether one kernel computes fc1 and the activation: no scales, the dtype of the layer, one weight or matrices that are a stack in
// memory, as which `weight` then holds them.
bool fuses_fc1_activation(const Quantized& input, QuantizedWeight& weight, const MlpArguments& mlp);

// By that kernel. `fc1_out` is empty unless `keep_fc1_out`.
Hidden fused_fc1_activation(const Quantized& input, const QuantizedWeight& weight, const MlpArguments& mlp,
                            const OperandFormats& formats, bool columns, bool keep_fc1_out);

// The activation of the output of fc1.
Hidden activation_of(const at::Tensor& fc1_out, const MlpArguments& mlp, const OperandFormats& formats,
                     bool columns);

// What the gradient of the output of fc1 is needed for.
struct HiddenNeedsGrad {
  bool input, weight, bias;
};

// What its backward reads.
struct SavedHidden {
  const at::Tensor &fc1_out, &group_sizes, &probs;
  const activation::NamedActivation& activation;
  gemm::LaunchOptions options;
  bool zero_tail;  // as in MlpArguments
};

// `fc1_out`: its gradient in the format of gradients, with that of the bias, as the bias, if needed. `probs`, [T]: the activation's contribution to
// the gradient of the probabilities.
struct HiddenGradient {
  QuantizedGradient fc1_out;
  at::Tensor probs;
};

// The data gradient of fc2 and the activation's backward. From the rowwise gradient of the output, of which it takes ownership.
HiddenGradient fc2_dgrad_activation_backward(Quantized grad, const WeightForBackward& fc2,
                                             const SavedHidden& saved, const OperandFormats& formats,
                                             const HiddenNeedsGrad& needs_grad);

}  // namespace transformer_plugin::linear
