// The computation of grouped_mlp: its forward, and the autograd node with its backward.
#pragma once

#include "linear/grouped_mlp_activation.h"

namespace transformer_plugin::linear {

// Without autograd.
at::Tensor grouped_mlp_forward(const MlpArguments& mlp, const OperandFormats& formats);
// With autograd; called from an Autograd kernel.
at::Tensor grouped_mlp_autograd(const MlpArguments& mlp, const OperandFormats& formats);

}  // namespace transformer_plugin::linear
