// The checks that swiglu shares with the ops that fuse it.
#pragma once

#include <optional>

#include "common/check.h"

namespace transformer_plugin::activation {

// `interleave` is 0, or 32 with whole blocks: F is `features`, which `argument` determines.
void check_interleave(const Argument& argument, const c10::SymInt& features, int64_t interleave);
// input [rows, 2F] and probs [rows].
void check_swiglu(const char* op, const at::Tensor& input, const std::optional<at::Tensor>& probs);
// grad [rows, F], for such an input.
void check_swiglu_grad(const char* op, const at::Tensor& grad, const at::Tensor& input);

}  // namespace transformer_plugin::activation
