// The parser of keys of activations, and the checks of what they mean for tensors.
#include "activation/description.h"

#include <charconv>
#include <cmath>
#include <iterator>
#include <string>

#include "activation/activation_checks.h"
#include "common/check.h"
#include "common/keys.h"

namespace transformer_plugin::activation {
namespace {

using at::Tensor;

// The functions of keys that have a trait.
template <typename Has>
std::string functions_that(const Has& has) {
  return names_in(kActivations, [&](const ActivationTraits& traits) {
    return has(traits) && traits.name.find(':') == std::string_view::npos;
  });
}

std::string grammar() {
  return "an activation key: " + functions_that([](const ActivationTraits&) { return true; }) +
         ", then options like swiglu:interleave=32 or swiglu:limit=7,alpha=1.702,offset=1";
}

// A decimal number, of which FP32 makes neither infinity nor zero; no value of anything else. "inf" is infinity.
std::optional<float> parse_number(std::string_view text) {
  if (text == "inf") return kNoLimit;
  if (text.find_first_not_of("0123456789.e+-") != std::string_view::npos) return std::nullopt;
  double number = 0.0;  // rounded to FP32 from FP64, as in Python
  const char* last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, number);
  const auto rounded = static_cast<float>(number);
  if (error != std::errc() || end != last || !std::isfinite(rounded)) return std::nullopt;
  if (rounded == 0.0f && number != 0.0) return std::nullopt;
  return rounded;
}

// Sets an option that has `initial` until now, or has the same value.
template <typename T>
bool set_option(T& option, T initial, T value) {
  if (option != initial && option != value) return false;
  option = value;
  return true;
}

bool apply_option(Activation& activation, std::string_view option) {
  if (!activation.traits().gated) return false;
  if (option == "interleave=32") return set_option(activation.interleave, 0, kInterleave);
  if (option == "interleave=1") return set_option(activation.interleave, 0, 1);
  if (activation.function != ActivationFunction::kSwiglu) return false;
  const size_t equals = option.find('=');
  if (equals == std::string_view::npos) return false;
  const std::string_view name = option.substr(0, equals);
  const std::optional<float> number = parse_number(option.substr(equals + 1));
  if (!number) return false;
  if (name == "limit") return *number > 0.0f && set_option(activation.limit, kNoLimit, *number);
  if (!std::isfinite(*number)) return false;
  if (name == "alpha") return *number > 0.0f && set_option(activation.alpha, 1.0f, *number);
  return name == "offset" && set_option(activation.offset, 0.0f, *number + 0.0f);
}

bool has_numbers(const Activation& activation) {
  return activation.limit != kNoLimit || activation.alpha != 1.0f || activation.offset != 0.0f;
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
  if (has_numbers(activation)) activation.function = ActivationFunction::kClampedSwiglu;
  return activation;
}

void check_interleave(const Argument& argument, const c10::SymInt& features, const Activation& activation) {
  TP_CHECK_VALUE(activation.interleave == 0 || features % activation.interleave == 0, argument.op,
                 argument.name, "whole blocks of 32 columns of the gate and of the linear part",
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
                 "an activation that is quantized in one pass, " << functions_that(
                     [](const ActivationTraits& traits) { return traits.has_fused_quantize; }),
                 "'" << activation.key << "'", "Take " << unquantized_op << ", and quantize its result");
  TP_CHECK_VALUE(activation.interleave == 0, op, "activation",
                 "an activation whose columns of the gate lie first", "'" << activation.key << "'",
                 "Take " << unquantized_op << ", and quantize its result");
  TP_CHECK_VALUE(activation.offset >= 0, op, "activation", "an activation without a negative offset",
                 "'" << activation.key << "'", "Take " << unquantized_op << ", and quantize its result");
}

}  // namespace transformer_plugin::activation
