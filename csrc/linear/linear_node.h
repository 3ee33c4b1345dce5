// linear and grouped_linear after their checks: the product in any format, and its node in autograd.
#pragma once

#include "linear/linear_call.h"

namespace transformer_plugin::linear {

// Without autograd. `call.input`: a matrix.
at::Tensor linear_forward(const LinearCall& call, const OperandFormats& formats);
// With autograd; called from an Autograd kernel. The input of a plain call may have any dimensions.
at::Tensor linear_with_gradient(const LinearCall& call, const OperandFormats& formats);

}  // namespace transformer_plugin::linear
