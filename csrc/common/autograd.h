// What the C++ gradients of the ops share.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>

namespace transformer_plugin {

inline bool wants_grad(const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }
inline bool wants_grad(const std::optional<at::Tensor>& tensor) { return tensor && wants_grad(*tensor); }

// Whether the call must be recorded. When not, an op goes straight to its kernel and saves the node's cost.
template <typename... Tensors>
bool any_wants_grad(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (wants_grad(tensors) || ...);
}

inline at::Tensor or_undefined(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}
inline std::optional<at::Tensor> as_optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

// at::AutoDispatchBelowADInplaceOrView: inside an Autograd kernel, the call goes to the backend's kernel.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

}  // namespace transformer_plugin
