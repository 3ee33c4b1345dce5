// The computation of grouped_mlp: its forward, and the autograd node with its backward.
#pragma once

#include "common/autograd.h"
#include "linear/grouped_mlp_activation.h"

namespace transformer_plugin::linear {

// Without autograd.
at::Tensor grouped_mlp_forward(const MlpArguments& mlp, const OperandFormats& formats);

// With autograd. The tensors that may need a gradient are arguments of their own, as torch finds them.
class GroupedMlpFunction : public DifferentiableOnce<GroupedMlpFunction> {
 public:
  static constexpr const char* kName = "grouped_mlp";
  static constexpr bool is_traceable = true;

  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                            at::TensorList fc1_weight, at::TensorList fc2_weight, const at::Tensor& probs,
                            const std::optional<at::Tensor>& fc1_bias,
                            const std::optional<at::Tensor>& fc2_bias, const MlpArguments& mlp,
                            const OperandFormats& formats);
  static torch::autograd::variable_list gradients(torch::autograd::AutogradContext* ctx,
                                                  const torch::autograd::variable_list& grads);
};

}  // namespace transformer_plugin::linear
