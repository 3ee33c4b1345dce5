// Loads transformer_plugin in a C++ program, and finds the ops of the examples by name in torch's dispatcher.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>

#include <optional>
#include <stdexcept>
#include <string>

namespace tp {

// Loading registers every op; nothing else is needed, and no Python.
inline void load_library(const std::string& path) {
  if (dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) throw std::runtime_error(dlerror());
}

template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

inline at::Tensor activation(const at::Tensor& input, const std::optional<at::Tensor>& probs,
                             c10::string_view key = "swiglu") {
  using Optional = std::optional<at::Tensor>;
  using Signature = at::Tensor(const at::Tensor&, const Optional&, const Optional&, c10::string_view);
  static const auto op = find<Signature>("transformer_plugin::activation");
  return op.call(input, probs, /*group_sizes=*/std::nullopt, key);
}

// The formats of a linear layer's operands.
struct Recipe {
  std::string input, weight, grad;
};

inline at::Tensor grouped_linear(const at::Tensor& input, const at::Tensor& weight,
                                 const at::Tensor& group_sizes, const Recipe& recipe) {
  using Optional = std::optional<at::Tensor>;
  using OptionalList = std::optional<at::TensorList>;
  using Signature = at::Tensor(const at::Tensor&, at::TensorList, const at::Tensor&, const Optional&,
                               const Optional&, c10::string_view, c10::string_view, c10::string_view,
                               OptionalList, int64_t, int64_t, OptionalList, bool, c10::string_view,
                               const Optional&, bool, const Optional&, c10::string_view);
  static const auto op = find<Signature>("transformer_plugin::grouped_linear");
  return op.call(input, weight, group_sizes, std::nullopt, std::nullopt, recipe.input, recipe.weight,
                 recipe.grad, std::nullopt, /*max_sms=*/0, /*expected_rows=*/-1, /*main_grad=*/std::nullopt,
                 /*accumulate=*/true, /*weight_grad=*/"none", /*wgrad_queue=*/std::nullopt,
                 /*save_original_input=*/false, /*dgrad_out=*/std::nullopt, /*weight_shard=*/"");
}

}  // namespace tp
