// The checks that activation shares with the ops that fuse it.
#pragma once

#include <optional>

#include "activation/description.h"
#include "common/check.h"

namespace transformer_plugin::activation {

// Whether F, which `argument` determines, has whole blocks of an interleaved input.
void check_interleave(const Argument& argument, const c10::SymInt& features, const Activation& activation);
// input [rows, 2F], without a gate [rows, F], and probs [rows].
void check_activation(const char* op, const at::Tensor& input, const std::optional<at::Tensor>& probs,
                      const Activation& activation);
// One for each row of `rows`; `meaning` says which those are.
void check_probs(const Argument& probs, const Argument& rows, const char* meaning);
// grad [rows, F], for such an input.
void check_activation_grad(const char* op, const at::Tensor& grad, const at::Tensor& input,
                           const Activation& activation);
// Whether `op`, which quantizes what `unquantized_op` computes, takes the activation.
void check_fused_quantize(const char* op, const char* unquantized_op, const NamedActivation& activation);

}  // namespace transformer_plugin::activation
