// The checks that swiglu shares with the ops that fuse it.
#pragma once

#include <optional>

#include "common/check.h"

namespace transformer_plugin::activation {

// input [rows, 2F] and probs [rows].
void check_swiglu(const char* op, const at::Tensor& input, const std::optional<at::Tensor>& probs);
// grad [rows, F], for such an input.
void check_swiglu_grad(const char* op, const at::Tensor& grad, const at::Tensor& input);

}  // namespace transformer_plugin::activation
