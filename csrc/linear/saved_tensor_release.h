// Frees saved tensors of a node as soon as its backward has used them. Autograd frees them when the whole node has run, which is
// late for a node that does the work of three.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "common/check.h"
#include "common/tensor.h"

namespace transformer_plugin::linear {

// Constructed in the backward. Frees nothing when the graph is retained, or when saved-tensor hooks were active in the forward,
// because others may hold their tensors.
class SavedTensorRelease {
 public:
  // Called in the forward. An entry costs host time, so the common case has none.
  static void prepare(torch::autograd::AutogradContext* ctx) {
    if (!at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) ctx->saved_data[kHooked] = true;
  }

  explicit SavedTensorRelease(const torch::autograd::AutogradContext* ctx)
      : frees_(!torch::autograd::get_current_graph_task_keep_graph() &&
               ctx->saved_data.find(kHooked) == ctx->saved_data.end()) {}

  // For a tensor that the node's forward made and nothing reads again. It becomes empty, so that a mistake is an error and not a
  // read of freed memory. A tracer's tensor stays unchanged.
  void operator()(const at::Tensor& saved) const {
    if (!frees_ || !saved.defined() || !saved.has_storage() || is_traced(saved)) return;
    saved.set_data(empty(saved, {0}, saved.scalar_type()));
  }

 private:
  static constexpr const char* kHooked = "hooked";

  bool frees_;
};

}  // namespace transformer_plugin::linear
