// What lies between the two products of grouped_mlp: SwiGLU times a probability per row, and its gradient. Two functions,
// each a product and the activation after it, so that a kernel that does both has one place to be called from.
#pragma once

#include "linear/operands.h"

namespace transformer_plugin::gemm {

struct MlpArguments {
  const at::Tensor& input;                    // [T, H]
  const at::Tensor& fc1_weight;               // [G, 2F, H], the gate first
  const at::Tensor& fc2_weight;               // [G, H, F]
  const at::Tensor& group_sizes;              // [G]
  const at::Tensor& probs;                    // [T]
  const std::optional<at::Tensor>& fc1_bias;  // [G, 2F]
  const std::optional<at::Tensor>& fc2_bias;  // [G, H]
  // What the weights were rounded to beforehand (linear/quantized_weight.h), read in place of them.
  const std::optional<at::TensorList>&quantized_fc1, &quantized_fc2;
};

// A matrix in the format of its role: rounded, or as it is where there is no format. What it stands for along columns is
// a view where one copy serves both directions.
Rounded round_role(const at::Tensor& x, const at::Tensor& group_sizes, const Format& format,
                   std::string_view key, bool rows, bool columns);
// Likewise a weight, or what it was rounded to beforehand, if that is given.
RoundedWeight round_role_weight(const at::Tensor& weight, const std::optional<at::TensorList>& quantized,
                                const RoleFormats& formats, bool backward);

struct Hidden {
  at::Tensor linear;   // [T, 2F], the first product with its bias
  Rounded activation;  // [T, F], SwiGLU of it, in the format of the second product's input
};

// `input` and `weight` are given away: they are freed once they are multiplied. `linear` may be left empty unless
// `keep_linear`.
Hidden product_then_activation(Rounded input, RoundedWeight weight, const MlpArguments& mlp,
                               const RoleFormats& formats, bool columns, bool keep_linear);

// What the gradient of the first product is wanted for.
struct HiddenWanted {
  bool input, weight, bias;
};

// `linear` is of the first product, in the format of gradients, and of its bias, [G, 2F], if that is wanted. `probs`, [T],
// is what SwiGLU adds to the gradient of the probabilities.
struct HiddenGradient {
  RoundedGradient linear;
  at::Tensor probs;
};

// From the gradient of the output along its rows, given away as before, and the second weight for data gradients,
// which is along its columns if `transpose_b`. `linear` is that of the forward.
HiddenGradient data_gradient_then_activation_backward(Scaled grad, const Scaled& weight, bool transpose_b,
                                                      const at::Tensor& linear, const at::Tensor& group_sizes,
                                                      const at::Tensor& probs, const RoleFormats& formats,
                                                      const HiddenWanted& wanted);

}  // namespace transformer_plugin::gemm
