// What an activation is, parsed from its key. Whatever depends on it reads this description: schemas have the key, kernels are
// instantiated for the functor of the function (activation/functions.h). The Python counterpart is
// transformer_plugin/activations.py.
//
// A key is a function, then options after a colon, separated by commas:
//   swiglu                silu(gate) * linear
//   geglu_tanh            gelu(gate) * linear, where gelu has the approximation with tanh
//   relu2                 relu(x)^2, without a gate
// Options:
//   interleave=32         functions with a gate: 32 columns of the gate and 32 of the linear part in turn, instead of all
//                         columns of the gate first
//   interleave=1          the same with one column of each in turn
//   limit=7               swiglu: the gate is at most 7, and the linear part at most 7 and at least -7; inf is no limit
//   alpha=1.702           swiglu: gate * sigmoid(1.702 * gate) in place of silu
//   offset=1              swiglu: linear + 1 in place of linear
// Numbers are decimal, and rounded to FP32.
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>

#include "common/math.h"

namespace transformer_plugin::activation {

// kClampedSwiglu is swiglu with a limit, an alpha or an offset.
enum class ActivationFunction : int32_t { kSwiglu, kClampedSwiglu, kGegluTanh, kRelu2 };

// What there is for a function. Ops ask for a trait, not for a function by name.
struct ActivationTraits {
  ActivationFunction function;
  std::string_view name;
  bool gated;                       // the input is [rows, 2F], a gate and a linear part; else [rows, F]
  bool has_gemm_epilogue = false;   // grouped_gemm_activation is one kernel on Hopper
  bool has_fused_quantize = false;  // activation_quantize and activation_backward_quantize have kernels
};

inline constexpr ActivationTraits kActivations[] = {
    {ActivationFunction::kSwiglu, "swiglu", true, true, true},
    {ActivationFunction::kClampedSwiglu, "swiglu:limit", true, true, true},
    {ActivationFunction::kGegluTanh, "geglu_tanh", true},
    {ActivationFunction::kRelu2, "relu2", false},
};

// Whether the table has the order of ActivationFunction, and fused kernels only of functions with a gate: they have no others.
constexpr bool is_table_consistent() {
  int32_t index = 0;
  for (const ActivationTraits& traits : kActivations) {
    if (static_cast<int32_t>(traits.function) != index++) return false;
    if (!traits.gated && (traits.has_gemm_epilogue || traits.has_fused_quantize)) return false;
  }
  return true;
}
static_assert(is_table_consistent());

inline constexpr int kInterleave = 32;
inline constexpr float kNoLimit = std::numeric_limits<float>::infinity();

struct Activation {
  ActivationFunction function = ActivationFunction::kSwiglu;
  int32_t interleave = 0;  // 0, 1 or kInterleave
  // Of kClampedSwiglu.
  float limit = kNoLimit, alpha = 1.0f, offset = 0.0f;

  const ActivationTraits& traits() const { return kActivations[static_cast<int32_t>(function)]; }
  // Columns of the input per feature of the output.
  int64_t columns_per_feature() const { return traits().gated ? 2 : 1; }
  // Whether columns of the gate and of the linear part alternate one by one.
  bool alternates() const { return interleave == 1; }
  // Whether activation_quantize and activation_backward_quantize take it. Of a negative offset the zeros past the groups would have
  // a sign, and bytes that are not 0.
  bool is_quantized_in_one_pass() const {
    return traits().has_fused_quantize && interleave == 0 && offset >= 0;
  }
};

inline constexpr std::string_view kDefaultKey = "swiglu";  // of the schemas

// With the key that says it, for host code that calls ops.
struct NamedActivation : Activation {
  std::string_view key = kDefaultKey;
};

// Parses `key`; raises a four-part ValueError that names `op` and its argument 'activation'.
NamedActivation parse_activation(const char* op, std::string_view key);

}  // namespace transformer_plugin::activation
