// The gradient of a weight that is cut over ranks (sharded/reduce_gradient.h).
#include "sharded/reduce_gradient.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "common/autograd.h"
#include "common/buffers.h"
#include "common/tensor.h"
#include "distributed/rank_group.h"
#include "sharded/group_weights.h"

namespace transformer_plugin::sharded {
namespace {

using at::Tensor;

constexpr const char* kOp = "reduce_gradient";

double factor_of(const WeightShard& shard) {
  return shard.mean ? 1.0 / static_cast<double>(shard.ranks) : 1.0;
}

void call_reduce_scatter_out(const Tensor& parts, const Tensor& out, bool accumulate,
                             const WeightShard& shard) {
  using Signature = void(const Tensor&, const Tensor&, bool, int64_t, std::string, int64_t, double);
  static const auto op = find_op<Signature>("reduce_scatter_out");
  shard.run(
      [&] { op.call(parts, out, accumulate, shard.ranks, shard.group, shard.timeout_ms, factor_of(shard)); });
}

// Whether somebody is told when the gradient is accumulated, or asked for it by name: then it must be the node's result.
bool is_observed(const Tensor& weight) {
  namespace impl = torch::autograd::impl;
  if (!weight.is_leaf() || !weight.requires_grad()) return true;
  const auto* tasks = torch::autograd::get_current_graph_task_exec_info();
  if (tasks && !tasks->empty()) return true;  // torch.autograd.grad, or backward(inputs=...)
  if (!impl::hooks(weight).empty() || impl::post_acc_grad_hooks(weight)) return true;
  const auto accumulator = impl::try_get_grad_accumulator(weight);
  if (!accumulator) return true;
  return !accumulator->post_hooks().empty() || !accumulator->pre_hooks().empty() ||
         !accumulator->tensor_pre_hooks().empty();
}

// On the side stream of the group.
void submit(const Tensor& parts, const Tensor& out, bool accumulate, const WeightShard& shard) {
  distributed::RankGroup group(kOp, shard.group, shard.timeout_ms, parts);
  GroupWeights::of(group.state()).reductions.submit(parts, out, [=] {
    call_reduce_scatter_out(parts, out, accumulate, shard);
  });
}

// Into `weight.grad`, as autograd would: a new tensor, or added to the one that is there.
void accumulate_late(const Tensor& parts, const WeightShard& shard, const Tensor& weight) {
  Tensor& grad = const_cast<Tensor&>(weight).mutable_grad();
  const bool accumulates = grad.defined();
  if (!accumulates) grad = at::empty(weight.sizes(), weight.options().requires_grad(false));
  submit(parts, grad, accumulates, shard);
}

bool can_be_late(const WeightShard& shard, const Tensor& parts, const GradientTarget& target) {
  if (!shard.late || is_traced(parts) || is_observed(target.weight)) return false;
  const Tensor& grad = target.weight.grad();
  if (target.main_grad || !grad.defined()) return true;
  return grad.layout() == at::kStrided && grad.is_contiguous() && grad.sizes() == target.weight.sizes() &&
         !grad.requires_grad() &&
         (grad.scalar_type() == parts.scalar_type() || grad.scalar_type() == at::kFloat);
}

}  // namespace

Tensor gradient_parts(const Tensor& weight, const WeightShard& shard, at::ScalarType dtype) {
  std::vector<c10::SymInt> sizes(weight.sym_sizes().begin(), weight.sym_sizes().end());
  sizes[0] = sizes[0] * shard.ranks;
  const Tensor parts = at::empty_symint(sizes, weight.options().dtype(dtype).requires_grad(false));
  const c10::SymInt padding = sizes[0] - shard.rows;
  if (padding != 0) parts.narrow_symint(0, shard.rows, padding).zero_();
  return parts;
}

Tensor reduce_gradient(const Tensor& parts, const WeightShard& shard, const GradientTarget& target) {
  const bool late = can_be_late(shard, parts, target);
  if (target.main_grad) {
    if (late) {
      submit(parts, *target.main_grad, target.accumulate, shard);
    } else {
      call_reduce_scatter_out(parts, *target.main_grad, target.accumulate, shard);
    }
    return {};
  }
  if (late) {
    accumulate_late(parts, shard, target.weight);
    return {};
  }
  const Tensor grad = at::empty_symint(
      target.weight.sym_sizes(), target.weight.options().dtype(parts.scalar_type()).requires_grad(false));
  call_reduce_scatter_out(parts, grad, false, shard);
  return grad;
}

}  // namespace transformer_plugin::sharded
