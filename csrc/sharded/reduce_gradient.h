// The gradient of a weight that is sharded over ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

#include "sharded/weight_shard.h"

namespace transformer_plugin::sharded {

// Where the sum of the ranks' gradients goes.
struct GradientTarget {
  at::Tensor weight;                         // this rank's shard, which the gradient belongs to
  std::optional<at::Tensor> main_grad = {};  // the buffer to write; otherwise the gradient is returned
  bool accumulate = true;                    // or write over what the buffer holds
};

// A buffer for the gradient of the unsharded weight as this rank computes it, with rows of zeros after it, which reduce_gradient
// takes: [ranks * n, ...] for a shard [n, ...].
at::Tensor new_unsharded_grad(const at::Tensor& weight, const WeightShard& shard, at::ScalarType dtype);

// Adds the ranks' gradients, each rank those of its rows. Where the sum goes, and when:
//
//   main_grad, `async`, and nothing observes the weight's gradient   into the buffer, on a side stream; returns an undefined tensor
//   main_grad otherwise                                              into the buffer, before it returns an undefined tensor
//   no main_grad, `async`, nothing observes                          into `weight.grad` by the end of the backward; undefined
//   otherwise, and while a graph is traced                           begun on a side stream; a work tensor for finish_gradient
//
// A reduce-scatter on a side stream is enqueued after the next gather of the group, or at once where it has a work tensor.
at::Tensor reduce_gradient(const at::Tensor& unsharded_grad, const WeightShard& shard,
                           const GradientTarget& target);

// `depends_on`: what the node computes meanwhile, or undefined. A compiler that orders ops by their operands would wait at once.
at::Tensor finish_gradient(const at::Tensor& work, const at::Tensor& unsharded_grad, const at::Tensor& weight,
                           const WeightShard& shard, const at::Tensor& depends_on);

// Helpers, also of reduce_gradient_list.h.
// Whether a hook observes the gradient, or torch.autograd.grad requested it: then the node must return it.
bool is_observed(const at::Tensor& weight);
// The dtype of a sum: that of the weight, where the sum over ranks can have it.
at::ScalarType sum_dtype(const at::Tensor& unsharded_grad, const at::Tensor& weight);
// The reduce-scatter of `unsharded_grad` into `out`, on the side stream of the group; see Reductions::submit.
void submit(const at::Tensor& unsharded_grad, const at::Tensor& out, bool accumulate,
            const WeightShard& shard, std::function<void()> deliver = {}, const at::Tensor& work = {});
// Into `weight.grad`, as autograd would, and on the stream on which autograd does so: others may add to it in this backward.
void add_to_gradient(at::Tensor weight, const at::Tensor& sum);
// Whether `weight.grad` is one that this can add to.
bool takes_sums(const at::Tensor& weight);

}  // namespace transformer_plugin::sharded
