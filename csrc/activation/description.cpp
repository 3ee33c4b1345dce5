// The parser of keys of activations, and the checks of what they mean for tensors.
#include "activation/description.h"

#include <iterator>
#include <string>

#include "activation/activation_checks.h"
#include "common/check.h"
#include "common/keys.h"

namespace transformer_plugin::activation {
namespace {

using at::Tensor;

std::string grammar() {
  return "an activation key: " + names_in(kActivations, [](const ActivationTraits&) { return true; }) +
         ", then options like swiglu:interleave=32";
}

bool apply_option(Activation& activation, std::string_view option) {
  if (option != "interleave=32" || !activation.traits().gated) return false;
  activation.interleave = kInterleave;
  return true;
}

}  // namespace

NamedActivation parse_activation(const char* op, std::string_view key) {
  NamedActivation activation;
  activation.key = key;
  const std::string_view function = key.substr(0, key.find(':'));
  bool valid = false;
  for (size_t i = 0; i < std::size(kActivations); ++i) {
    if (function != kActivations[i].name) continue;
    valid = true;
    activation.function = static_cast<ActivationFunction>(i);
  }
  valid =
      valid && apply_options(key, [&](std::string_view option) { return apply_option(activation, option); });
  TP_CHECK_VALUE(valid, op, "activation", grammar(), "'" << key << "'",
                 "transformer_plugin.activations lists them");
  return activation;
}

void check_interleave(const Argument& argument, const c10::SymInt& features, const Activation& activation) {
  TP_CHECK_VALUE(activation.interleave == 0 || features % kInterleave == 0, argument.op, argument.name,
                 "whole blocks of 32 columns of the gate and of the linear part",
                 describe(argument.tensor) << " for " << features << " of each",
                 "Take a multiple of 32, or an activation without interleave");
}

void check_activation(const char* op, const Tensor& input, const std::optional<Tensor>& probs,
                      const Activation& activation) {
  const Argument input_argument{op, "input", input};
  check_dtype(input_argument, kFloatTypes);
  check_dim(input_argument, 2);
  TP_CHECK_VALUE(!activation.traits().gated || input.sym_size(1) % 2 == 0, op, "input",
                 "an even number of columns (gate and linear halves)", describe(input),
                 "Concatenate the two halves along the last dimension");
  check_interleave(input_argument, input.sym_size(1) / 2, activation);
  if (!probs) return;
  check_probs({op, "probs", *probs}, input_argument, "the rows of 'input'");
}

void check_probs(const Argument& probs, const Argument& rows, const char* meaning) {
  check_dtype(probs, {at::kFloat});
  check_dim(probs, 1);
  check_size(probs, 0, rows.tensor.sym_size(0), meaning);
  check_same_device(probs, rows);
}

void check_activation_grad(const char* op, const Tensor& grad, const Tensor& input,
                           const Activation& activation) {
  const Argument argument{op, "grad", grad};
  check_dim(argument, 2);
  check_same_dtype(argument, {op, "input", input});
  check_same_device(argument, {op, "input", input});
  check_size(argument, 0, input.sym_size(0), "the rows of 'input'");
  check_size(argument, 1, input.sym_size(1) / activation.columns_per_feature(),
             activation.traits().gated ? "half the columns of 'input'" : "the columns of 'input'");
}

void check_fused_quantize(const char* op, const char* unquantized_op, const NamedActivation& activation) {
  TP_CHECK_VALUE(activation.traits().has_fused_quantize, op, "activation",
                 "an activation that is quantized in one pass, " << names_in(
                     kActivations, [](const ActivationTraits& traits) { return traits.has_fused_quantize; }),
                 "'" << activation.key << "'", "Take " << unquantized_op << ", and quantize its result");
  TP_CHECK_VALUE(activation.interleave == 0, op, "activation",
                 "an activation whose columns of the gate lie first", "'" << activation.key << "'",
                 "Take " << unquantized_op << ", and quantize its result");
}

}  // namespace transformer_plugin::activation
