// Where the gradient of a weight goes: to autograd, into the buffers of a main_grad, into a queue, by a reduce-scatter to the
// ranks' shards, or to another runtime.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <optional>
#include <vector>

#include "linear/main_grad.h"
#include "linear/operands.h"
#include "sharded/weight_shard.h"

namespace transformer_plugin::linear {

// The tensors of a weight among the inputs of its node.
struct WeightInputs {
  torch::autograd::AutogradContext* ctx;
  size_t first, count;
  bool is_grouped = true;  // a weight [G, N, K]

  bool needs_grad(size_t i) const { return ctx->needs_input_grad(first + i); }
  // The tensors that need no gradient.
  std::vector<int64_t> skipped() const;
  // What autograd gets of the gradients of all groups: that tensor, or views of it where the weight is several matrices.
  torch::autograd::variable_list split(const at::Tensor& gradients) const;
};

// grad^T @ input, from columnwise operands.
struct WgradProduct {
  const Quantized &grad, &input;
  // A dense layer may have group sizes, of one group of all its rows.
  const std::optional<at::Tensor>& group_sizes;
  // Of what autograd gets.
  at::ScalarType dtype;
  gemm::LaunchOptions options = {};
};

// One for each weight and backward.
class WgradDestination {
 public:
  virtual ~WgradDestination() = default;

  // Whether compute() allocates a gradient of the weight's size that lives until the node ends, which may then call it late.
  virtual bool allocates() const { return false; }
  // Whether compute() only keeps the operands, in a queue.
  virtual bool is_deferred() const { return false; }
  // Whether compute() comes before the data gradient, behind which the gradient then travels.
  virtual bool goes_first() const { return false; }
  // Whether the weight is unsharded for the data gradient before compute(): another runtime expects this order.
  virtual bool follows_unshard() const { return false; }
  // Computes the gradient, or keeps the operands. Returns what autograd gets for each tensor of the weight, or what finish() needs.
  virtual torch::autograd::variable_list compute(const WgradProduct& product) = 0;
  // To be called last: makes what autograd gets from what compute() returned. The gradient of a sharded weight travels while the
  // node computes `depends_on`.
  virtual void finish(torch::autograd::variable_list& /*computed*/, const at::Tensor& /*depends_on*/) {}
};

// In the forward: saves what wgrad_destination() needs. `name`: of the argument for the main_grad.
void save_wgrad_destination(torch::autograd::AutogradContext* ctx, const char* name,
                            const MainGrad& main_grad, at::TensorList weight,
                            const sharded::WeightShard& shard);
// In the backward; null if no tensor of the weight needs a gradient. `shard` outlives the result.
std::unique_ptr<WgradDestination> wgrad_destination(const WeightInputs& weight, const char* name,
                                                    const sharded::WeightShard& shard);

// Helpers of the destinations.
// What autograd gets for a weight whose gradient is in buffers.
torch::autograd::variable_list placeholders(const WeightInputs& weight, const SavedMainGrad& main_grad,
                                            at::ScalarType dtype);
// Raises an error if torch.autograd.grad asks for the gradient of the weight, which the node does not return. `name`: as in
// save_wgrad_destination. `is_deferred`: it goes into a queue, and not into a buffer.
void refuse_capture(const WeightInputs& weight, const char* name, bool is_deferred);

}  // namespace transformer_plugin::linear
