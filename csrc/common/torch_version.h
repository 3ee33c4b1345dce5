// What differs between the versions of torch that this builds with: all of it is here.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

#include <memory>
#include <utility>

namespace transformer_plugin {

// A node of the autograd graph, as torch::autograd::set_history takes it: since torch 2.13 torch counts references in the
// node itself.
template <typename Node, typename... Arguments>
auto make_node(Arguments&&... arguments) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
#else
  return std::make_shared<Node>(std::forward<Arguments>(arguments)...);
#endif
}

// A contiguous copy in a traced graph. Inductor of torch 2.13 and 2.14 removes a clone, and then reads wrong memory if the
// operand shares its storage with another argument of the op (pytorch issue 192226). It keeps a product with 1, of the same bits.
inline at::Tensor traced_copy(const at::Tensor& tensor) {
#if TORCH_VERSION_MAJOR == 2 && (TORCH_VERSION_MINOR == 13 || TORCH_VERSION_MINOR == 14)
  return tensor.mul(1).contiguous();
#else
  return tensor.clone(at::MemoryFormat::Contiguous);
#endif
}

}  // namespace transformer_plugin
