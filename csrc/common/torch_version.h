// What differs between the versions of torch that this builds with: all of it is here.
#pragma once

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

}  // namespace transformer_plugin
