// Freeing what a node keeps for its backward as soon as it is used. Autograd does so only when all of a node has run,
// which is late for a node that does the work of three.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "common/tensor.h"

namespace transformer_plugin::gemm {

// Made in the backward. Frees nothing when the graph is kept, or when saved-tensor hooks were active in the forward, whose
// tensors may be held by others.
class EarlyRelease {
 public:
  // In the forward. An entry costs a call time, so there is none in the common case.
  static void prepare(torch::autograd::AutogradContext* ctx) {
    if (!at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) ctx->saved_data[kHooked] = true;
  }

  explicit EarlyRelease(const torch::autograd::AutogradContext* ctx)
      : frees_(!torch::autograd::get_current_graph_task_keep_graph() &&
               ctx->saved_data.find(kHooked) == ctx->saved_data.end()) {}

  // A saved tensor that the node's forward made and nothing will read again. It has no elements from here on, so that a
  // mistake is an error and not a read of freed memory. A tracer's tensor stays as it is.
  void operator()(const at::Tensor& saved) const {
    if (!frees_ || !saved.defined() || !saved.has_storage() || saved.key_set().has_any(kTraced)) return;
    saved.set_data(empty(saved, {0}, saved.scalar_type()));
  }

 private:
  static constexpr const char* kHooked = "hooked";
  static constexpr c10::DispatchKeySet kTraced{c10::DispatchKey::Python, c10::DispatchKey::Functionalize};

  bool frees_;
};

}  // namespace transformer_plugin::gemm
