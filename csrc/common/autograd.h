// Shared by the C++ gradients of the ops.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "common/torch_version.h"

namespace transformer_plugin {

inline bool requires_grad(const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }
inline bool requires_grad(const std::optional<at::Tensor>& tensor) {
  return tensor && requires_grad(*tensor);
}
inline bool requires_grad(at::TensorList tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return requires_grad(tensor); });
}

// For forward-mode differentiation.
inline bool has_tangent(const at::Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}
inline bool has_tangent(const std::optional<at::Tensor>& tensor) { return tensor && has_tangent(*tensor); }
inline bool has_tangent(at::TensorList tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return has_tangent(tensor); });
}

// Whether the call must be recorded. If not, an op calls its kernel directly, which saves the cost of a node.
// A tensor with a tangent goes to the node, which rejects it: the kernel would ignore the tangent.
template <typename... Tensors>
bool any_requires_grad(const Tensors&... tensors) {
  return (at::GradMode::is_enabled() && (requires_grad(tensors) || ...)) || (has_tangent(tensors) || ...);
}

inline at::Tensor or_undefined(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}
inline std::optional<at::Tensor> as_optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

// Excludes autocast, whose keys the dispatcher tries first: what an op calls must keep its dtypes.
class WithoutAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard_{c10::autocast_dispatch_keyset};
};

// For code inside an Autograd kernel or a backend's kernel: calls go to the backend's kernels directly,
// without autograd and autocast.
class BelowAutograd {
  c10::impl::ExcludeDispatchKeyGuard guard_{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                            c10::autocast_dispatch_keyset};
};

// Raises the error for None in place of the `index`-th required tensor of the op.
[[noreturn]] void refuse_none(const char* op, size_t index);

// The type from which torch makes the node, so that the node gets the name of the op (see CppNode below).
template <typename Self>
class NodeOf : public Self {};

// A torch::autograd::Function that rejects None for a required tensor, before torch asks it for its device.
// Required tensors are in the order of the op Self::kName.
template <typename Self>
class CheckedFunction : public torch::autograd::Function<Self> {
 public:
  // The op that a node belongs to, where Self serves several.
  static const char* op_of(const torch::autograd::AutogradContext*) { return Self::kName; }

  template <typename... Arguments>
  static auto apply(Arguments&&... arguments) {
    size_t index = 0;
    (check_defined(arguments, index), ...);
    return torch::autograd::Function<NodeOf<Self>>::apply(std::forward<Arguments>(arguments)...);
  }

 private:
  template <typename Argument>
  static void check_defined(const Argument& argument, size_t& index) {
    if constexpr (std::is_same_v<Argument, at::Tensor>) {
      if (!argument.defined()) refuse_none(Self::kName, index);
      ++index;
    }
  }
};

// A function whose backward is Self::gradients(). With create_graph=True, results without a graph raise an
// error when they are differentiated again, because they would silently count as constants. Unless
// Self::keeps_graphs(ctx) these are all results; otherwise gradients() calls differentiable ops, and these are
// the results that still have no graph.
template <typename Self>
class DifferentiableFunction : public CheckedFunction<Self> {
 public:
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    const WithoutAutocast guard;
    if (!at::GradMode::is_enabled()) return Self::gradients(ctx, grads);
    const torch::autograd::variable_list saved = ctx->get_saved_variables();
    torch::autograd::variable_list results;
    {
      const at::AutoGradMode mode(Self::keeps_graphs(ctx));
      results = Self::gradients(ctx, grads);
    }
    if (requires_grad(at::TensorList(grads)) || requires_grad(at::TensorList(saved)))
      refuse(Self::op_of(ctx), torch::autograd::collect_next_edges(grads, saved), results);
    return results;
  }

 private:
  static void refuse(const char* op, torch::autograd::edge_list&& from,
                     torch::autograd::variable_list& results) {
    const auto refusal = make_node<torch::autograd::Error>(
        std::string("transformer_plugin::") + op +
            ": gradient: expected to be differentiated once, got a second time (create_graph=True). "
            "Write this part in plain PyTorch for that.",
        std::move(from));
    for (at::Tensor& result : results) {
      if (!result.defined() || result.requires_grad()) continue;
      result = result.detach();  // the caller may have the same tensor
      torch::autograd::set_history(result, refusal);
    }
  }
};

template <typename Self>
class DifferentiableOnce : public DifferentiableFunction<Self> {
 public:
  static bool keeps_graphs(const torch::autograd::AutogradContext*) { return false; }
};
template <typename Self>
class DifferentiableTwice : public DifferentiableFunction<Self> {
 public:
  static bool keeps_graphs(const torch::autograd::AutogradContext*) { return true; }
};

}  // namespace transformer_plugin

// The node of Self. It overrides the name that profiles and `grad_fn` show, which would be that of a C++
// type.
template <typename Self>
struct torch::autograd::CppNode<transformer_plugin::NodeOf<Self>> : torch::autograd::CppNode<Self> {
  std::string name() const override {
    return std::string("transformer_plugin::") + Self::op_of(&this->ctx_) + "_backward_node";
  }
  // Called last in Function::apply(), which has used the marks of mark_non_differentiable() by then. Compiled autograd asserts
  // that a node has none.
  void save_variables_to_ctx() {
    torch::autograd::CppNode<Self>::save_variables_to_ctx();
    this->ctx_.non_differentiable_.clear();
  }
};
