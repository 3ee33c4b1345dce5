// The gradient of a weight that is cut over ranks (sharded/reduce_gradient.h). reduce_gradient_out: into a buffer.
#include "sharded/reduce_gradient.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "common/autograd.h"
#include "common/buffers.h"
#include "common/check.h"
#include "common/register.h"
#include "common/tensor.h"
#include "distributed/rank_group.h"
#include "sharded/group_weights.h"

namespace transformer_plugin::sharded {
namespace {

using at::Tensor;

constexpr const char* kOp = "reduce_gradient_out";

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

void check_out(const Tensor& parts, const Tensor& weight, const Tensor& out, std::string_view key) {
  check_defined({kOp, "parts", parts});
  check_defined({kOp, "weight", weight});
  check_defined({kOp, "out", out});
  const WeightShard shard = parse_weight_shard(kOp, key);
  TP_CHECK_VALUE(shard.is_cut(), kOp, "shard", "the key of a weight that is cut over ranks", "''",
                 "Add the gradient of a whole weight itself");
  check_same_device({kOp, "weight", weight}, {kOp, "parts", parts});
  TP_CHECK_VALUE(weight.sym_sizes() == out.sym_sizes(), kOp, "out", "the sizes of 'weight'", describe(out),
                 "Allocate it like this rank's part of the weight");
}

void reduce_gradient_out(const Tensor& parts, const Tensor& weight, const Tensor& out, bool accumulate,
                         std::string_view key) {
  check_out(parts, weight, out, key);
  const WeightShard shard = parse_weight_shard(kOp, key);
  const bool in_backward = torch::autograd::get_current_graph_task_id() >= 0;
  if (in_backward && can_be_late(shard, parts, {weight, out, accumulate})) {
    submit(parts, out, accumulate, shard);
  } else {
    call_reduce_scatter_out(parts, out, accumulate, shard);
  }
}

void reduce_gradient_out_meta(const Tensor& parts, const Tensor& weight, const Tensor& out, bool,
                              std::string_view key) {
  check_out(parts, weight, out, key);
}

}  // namespace

TP_IMPL_NO_GRADIENT(kOp, reduce_gradient_out, reduce_gradient_out_meta);

Tensor gradient_parts(const Tensor& weight, const WeightShard& shard, at::ScalarType dtype) {
  std::vector<c10::SymInt> sizes(weight.sym_sizes().begin(), weight.sym_sizes().end());
  sizes[0] = sizes[0] * shard.ranks;
  const Tensor parts = at::empty_symint(sizes, weight.options().dtype(dtype).requires_grad(false));
  const c10::SymInt padding = sizes[0] - shard.rows;
  if (padding != 0) parts.narrow_symint(0, shard.rows, padding).zero_();
  return parts;
}

Tensor reduce_gradient(const Tensor& parts, std::string_view shard_key, const GradientTarget& target) {
  if (target.main_grad) {
    using Signature = void(const Tensor&, const Tensor&, const Tensor&, bool, std::string_view);
    static const auto op = find_op<Signature>(kOp);
    op.call(parts, target.weight, *target.main_grad, target.accumulate, shard_key);
    return {};
  }
  const WeightShard shard = parse_weight_shard(kOp, shard_key);
  if (can_be_late(shard, parts, target)) {
    accumulate_late(parts, shard, target.weight);
    return {};
  }
  const Tensor grad = at::empty_symint(
      target.weight.sym_sizes(), target.weight.options().dtype(parts.scalar_type()).requires_grad(false));
  call_reduce_scatter_out(parts, grad, false, shard);
  return grad;
}

}  // namespace transformer_plugin::sharded
