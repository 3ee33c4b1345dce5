// main_grad: a buffer of the caller into which a layer's backward adds the gradient of a weight, in the epilogue of the product
// that computes it.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <vector>

#include "linear/operands.h"
#include "linear/weights.h"
#include "sharded/reduce_gradient_list.h"

namespace transformer_plugin::linear {

// The options without which no buffer was given, and the values of `weight_grad`.
void check_main_grad_options(const char* op, bool has_buffers, const MainGrad& main_grad);
// Dtype, sizes, device, strides. `is_grouped`: a weight [G, N, K].
void check_main_grad(const char* name, const MainGrad& main_grad, const WeightArgument& weight,
                     bool is_grouped);

// All of it for a layer with one weight and arguments of the usual names. `data`: any tensor of the layer.
void check_weight_gradient(const MainGrad& main_grad, const WeightArgument& weight, bool is_grouped,
                           const at::Tensor& data);

// What a weight that is sharded over ranks may have: a part that is large enough, a buffer for each tensor and no queue.
void check_weight_shard(const WeightArgument& weight, const sharded::WeightShard& shard,
                        const MainGrad& main_grad, bool is_quantized = false);

// In the forward: keeps the buffers and the queue for the backward, untracked, because two forwards may come
// before two backwards. `name`: of the argument. Nothing without either. Of a sharded weight also this rank's shard.
void save_main_grad(torch::autograd::AutogradContext* ctx, const char* name, const MainGrad& main_grad,
                    at::TensorList weight, const sharded::WeightShard& shard);
// In the forward: saves the key of a sharded weight, which the backward gathers again. In the backward: the key, parsed.
void save_weight_shard(torch::autograd::AutogradContext* ctx, const sharded::WeightShard& shard);
sharded::WeightShard saved_weight_shard(const torch::autograd::AutogradContext* ctx);

// In the backward: raises an error if torch.autograd.grad asks for the gradient of the weight, which the node does not return.
// `place`, `count`: as below. `is_deferred`: it goes into a queue, and not into a buffer.
void refuse_capture(const char* name, size_t place, size_t count, bool is_deferred);
// In the backward: the shards of a weight that save_main_grad saved, if it did.
std::vector<at::Tensor> saved_shards(torch::autograd::AutogradContext* ctx, const char* name,
                                     const sharded::WeightShard& shard);

// In the backward: what becomes of the gradient of one weight.
class WeightGradient {
 public:
  // `place` and `count`: the weight's tensors among the node's tensors. `name`: as in save_main_grad. `shard`: outlives this.
  WeightGradient(torch::autograd::AutogradContext* ctx, const char* name, size_t place, size_t count,
                 const sharded::WeightShard& shard, bool is_grouped = true);

  bool is_wanted() const { return is_wanted_; }
  // Whether compute() only keeps the operands in a queue.
  bool is_deferred() const { return queue_.has_value(); }
  // Whether compute() allocates a tensor of the weight's size.
  bool allocates() const { return (buffers_.empty() && !queue_) || is_cut(); }
  // Whether each rank gets the gradient of its part.
  bool is_cut() const { return is_wanted_ && shard_.is_cut(); }
  // Whether compute() comes before the data gradient, behind which the gradient then travels. Another runtime gets it after.
  bool goes_first() const { return is_cut() && !shard_.is_foreign(); }
  // What autograd gets for each tensor of the weight, of `dtype`. With a queue nothing is computed. The gradients
  // of several matrices are views of one tensor. A dense layer may have group sizes, of one group of all its rows.
  torch::autograd::variable_list compute(const Quantized& grad, const Quantized& input,
                                         const std::optional<at::Tensor>& group_sizes, at::ScalarType dtype,
                                         const gemm::LaunchOptions& options = {}) const;
  // What autograd gets, from what compute() returned. To be called last: the gradient of a sharded weight travels while the
  // node computes `after`.
  void finish(at::Tensor& computed, at::ScalarType dtype, const at::Tensor& after) const;
  void finish(torch::autograd::variable_list& computed, at::ScalarType dtype, const at::Tensor& after) const;

 private:
  bool wants(size_t i) const { return ctx_->needs_input_grad(place_ + i); }
  std::vector<int64_t> skipped() const;
  void copy_to_buffers(const std::vector<at::Tensor>& results) const;
  torch::autograd::variable_list placeholders(at::ScalarType dtype) const;
  at::Tensor reduced(const Quantized& grad, const Quantized& input,
                     const std::optional<at::Tensor>& group_sizes, at::ScalarType dtype,
                     const gemm::LaunchOptions& options) const;
  // Of a weight of another runtime, in whose buffers it is written.
  torch::autograd::variable_list foreign(const Quantized& grad, const Quantized& input,
                                         const std::optional<at::Tensor>& group_sizes, at::ScalarType dtype,
                                         const gemm::LaunchOptions& options) const;
  bool is_returned(const at::Tensor& parts) const;
  at::Tensor like_the_sum() const;
  sharded::ListTarget list_target() const;
  at::Tensor reduced_list(const Quantized& grad, const Quantized& input,
                          const std::optional<at::Tensor>& group_sizes, at::ScalarType dtype,
                          const gemm::LaunchOptions& options) const;

  torch::autograd::AutogradContext* ctx_;
  size_t place_, count_;
  bool is_grouped_, is_wanted_ = false;
  std::vector<at::Tensor> buffers_;
  std::optional<at::Tensor> queue_;
  const sharded::WeightShard& shard_;
  at::Tensor weight_;                  // of a sharded weight
  std::vector<at::Tensor> list_ = {};  // or the matrices of a sharded list
  mutable at::Tensor parts_;           // operand of the reduce-scatter that compute() has started
};

}  // namespace transformer_plugin::linear
