// The gradient of a weight that is sharded over ranks (sharded/reduce_gradient.h). reduce_gradient_out: into a buffer.
// start_reduce_gradient and finish_reduce_gradient: begun, and complete.
#include "sharded/reduce_gradient.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "common/autograd.h"
#include "common/buffers.h"
#include "common/check.h"
#include "common/ops/sharded.h"
#include "common/ops/tensor_parallel.h"
#include "common/register.h"
#include "common/tensor.h"
#include "distributed/rank_group.h"
#include "sharded/group_weights.h"
#include "tensor_parallel/exchange.h"

namespace transformer_plugin::sharded {
namespace {

using at::Tensor;

constexpr const char *kOp = "reduce_gradient_out", *kStartOp = "start_reduce_gradient",
                     *kFinishOp = "finish_reduce_gradient";

double factor_of(const WeightShard& shard) {
  return shard.mean ? 1.0 / static_cast<double>(shard.ranks) : 1.0;
}

void call_reduce_scatter_out(const Tensor& unsharded_grad, const Tensor& out, bool accumulate,
                             const WeightShard& shard) {
  shard.run([&] {
    ops::reduce_scatter_out(unsharded_grad, out, accumulate, shard.ranks, shard.group, shard.timeout_ms,
                            factor_of(shard));
  });
}

}  // namespace

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

void submit(const Tensor& unsharded_grad, const Tensor& out, bool accumulate, const WeightShard& shard,
            std::function<void()> deliver, const Tensor& work) {
  distributed::RankGroup group(kOp, shard.group, shard.timeout_ms, unsharded_grad);
  GroupWeights::of(group.state())
      .reductions.submit(
          unsharded_grad, out, [=] { call_reduce_scatter_out(unsharded_grad, out, accumulate, shard); },
          std::move(deliver), work);
}

at::ScalarType sum_dtype(const Tensor& unsharded_grad, const Tensor& weight) {
  return weight.scalar_type() == at::kFloat && unsharded_grad.scalar_type() != at::kDouble
             ? at::kFloat
             : unsharded_grad.scalar_type();
}

void add_to_gradient(Tensor weight, const Tensor& sum) {
  const at::AutoGradMode mode(false);
  Tensor& grad = weight.mutable_grad();
  if (grad.defined()) {
    grad.add_(sum);
  } else {
    grad = sum;
  }
}

bool takes_sums(const Tensor& weight) {
  const Tensor& grad = weight.grad();
  return !grad.defined() || (grad.layout() == at::kStrided && !grad.requires_grad());
}

namespace {

// Into `weight.grad`.
void accumulate_asynchronously(const Tensor& unsharded_grad, const WeightShard& shard, const Tensor& weight) {
  const Tensor out = at::empty(
      weight.sizes(), weight.options().dtype(sum_dtype(unsharded_grad, weight)).requires_grad(false));
  submit(unsharded_grad, out, false, shard, [weight, out] { add_to_gradient(weight, out); });
}

bool can_be_asynchronous(const WeightShard& shard, const Tensor& unsharded_grad,
                         const GradientTarget& target) {
  if (!shard.asynchronous || is_traced(unsharded_grad) || is_observed(target.weight)) return false;
  return target.main_grad || takes_sums(target.weight);
}

WeightShard checked(const char* op, const Tensor& unsharded_grad, const Tensor& weight,
                    std::string_view key) {
  check_dtype({op, "unsharded_grad", unsharded_grad}, {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble});
  check_defined({op, "weight", weight});
  WeightShard shard = parse_weight_shard(op, key);
  TP_CHECK_VALUE(shard.is_sharded(), op, "shard", "the key of a weight that is sharded over ranks", "''",
                 "Add the gradient of an unsharded weight itself");
  check_same_device({op, "weight", weight}, {op, "unsharded_grad", unsharded_grad});
  std::vector<c10::SymInt> sizes(weight.sym_sizes().begin(), weight.sym_sizes().end());
  TP_CHECK_VALUE(!sizes.empty(), op, "weight", "at least 1 dimension", describe(weight), "Pass rows");
  sizes[0] = sizes[0] * shard.ranks;
  TP_CHECK_VALUE(
      unsharded_grad.sym_sizes() == c10::SymIntArrayRef(sizes), op, "unsharded_grad",
      "the sizes " << c10::SymIntArrayRef(sizes) << ", those of 'weight' for " << shard.ranks << " ranks",
      describe(unsharded_grad), "Pass the gradient of the unsharded weight with zeros after it");
  return shard;
}

WeightShard check_out(const Tensor& unsharded_grad, const Tensor& weight, const Tensor& out,
                      std::string_view key) {
  const Argument to{kOp, "out", out};
  WeightShard shard = checked(kOp, unsharded_grad, weight, key);
  check_no_gradient({kOp, "unsharded_grad", unsharded_grad}, "Detach it: the sum of gradients has none");
  check_same_device(to, {kOp, "unsharded_grad", unsharded_grad});
  TP_CHECK_TYPE(out.scalar_type() == unsharded_grad.scalar_type() ||
                    (out.scalar_type() == at::kFloat && unsharded_grad.scalar_type() != at::kDouble),
                kOp, "out", "the dtype of 'unsharded_grad', or float32", describe(out),
                "Allocate it with that dtype");
  TP_CHECK_VALUE(weight.sym_sizes() == out.sym_sizes(), kOp, "out", "the sizes of 'weight'", describe(out),
                 "Allocate it like this rank's shard of the weight");
  check_contiguous(to);
  tensor_parallel::check_memory(to);
  tensor_parallel::check_memory({kOp, "unsharded_grad", unsharded_grad});
  check_written(to);
  return shard;
}

void reduce_gradient_out(const Tensor& unsharded_grad, const Tensor& weight, const Tensor& out,
                         bool accumulate, std::string_view key) {
  const WeightShard shard = check_out(unsharded_grad, weight, out, key);
  check_apart(kOp, {{"out", out}}, {{"unsharded_grad", unsharded_grad}, {"weight", weight}});
  const bool in_backward = torch::autograd::get_current_graph_task_id() >= 0;
  if (in_backward && can_be_asynchronous(shard, unsharded_grad, {weight, out, accumulate})) {
    submit(unsharded_grad, out, accumulate, shard);
  } else {
    call_reduce_scatter_out(unsharded_grad, out, accumulate, shard);
  }
}

void reduce_gradient_out_meta(const Tensor& unsharded_grad, const Tensor& weight, const Tensor& out, bool,
                              std::string_view key) {
  check_out(unsharded_grad, weight, out, key);
}

Tensor start_meta(const Tensor& unsharded_grad, const Tensor& weight, std::string_view key) {
  checked(kStartOp, unsharded_grad, weight, key);
  return empty(unsharded_grad, {1}, at::kLong);
}

Tensor start_reduce_gradient(const Tensor& unsharded_grad, const Tensor& weight, std::string_view key) {
  const WeightShard shard = checked(kStartOp, unsharded_grad, weight, key);
  check_no_gradient({kStartOp, "unsharded_grad", unsharded_grad}, "Detach it: the sum of gradients has none");
  const Tensor work = at::zeros({1}, unsharded_grad.options().dtype(at::kLong).requires_grad(false));
  submit(unsharded_grad, empty(unsharded_grad, weight.sym_sizes(), sum_dtype(unsharded_grad, weight)), false,
         shard, {}, work);
  return work;
}

Tensor finish_meta(const Tensor& work, const Tensor& unsharded_grad, const Tensor& weight,
                   std::string_view key, const std::optional<Tensor>&) {
  check_dtype({kFinishOp, "work", work}, {at::kLong});
  checked(kFinishOp, unsharded_grad, weight, key);
  return empty(unsharded_grad, weight.sym_sizes(), sum_dtype(unsharded_grad, weight));
}

// A work tensor that is not known, such as a copy, is made up for by another sum, on all ranks alike.
Tensor finish_reduce_gradient(const Tensor& work, const Tensor& unsharded_grad, const Tensor& weight,
                              std::string_view key, const std::optional<Tensor>&) {
  check_dtype({kFinishOp, "work", work}, {at::kLong});
  const WeightShard shard = checked(kFinishOp, unsharded_grad, weight, key);
  check_no_gradient({kFinishOp, "unsharded_grad", unsharded_grad},
                    "Detach it: the sum of gradients has none");
  distributed::RankGroup group(kFinishOp, shard.group, shard.timeout_ms, unsharded_grad);
  Tensor out;
  shard.run([&] { out = GroupWeights::of(group.state()).reductions.finish(work); });
  if (out.defined()) {
    TP_CHECK_VALUE(out.sizes() == weight.sizes() && out.scalar_type() == sum_dtype(unsharded_grad, weight),
                   kFinishOp, "weight",
                   "the weight that the work was begun for, whose sum is " << describe(out), describe(weight),
                   "Pass the arguments of start_reduce_gradient");
    return out;
  }
  out = empty(unsharded_grad, weight.sym_sizes(), sum_dtype(unsharded_grad, weight));
  call_reduce_scatter_out(unsharded_grad, out, false, shard);
  return out;
}

}  // namespace

TP_IMPL_NO_GRADIENT(reduce_gradient_out, reduce_gradient_out, reduce_gradient_out_meta);
TP_IMPL_NO_GRADIENT(start_reduce_gradient, start_reduce_gradient, start_meta);
TP_IMPL_NO_GRADIENT(finish_reduce_gradient, finish_reduce_gradient, finish_meta);

Tensor new_unsharded_grad(const Tensor& weight, const WeightShard& shard, at::ScalarType dtype) {
  std::vector<c10::SymInt> sizes(weight.sym_sizes().begin(), weight.sym_sizes().end());
  sizes[0] = sizes[0] * shard.ranks;
  const Tensor unsharded_grad = at::empty_symint(sizes, weight.options().dtype(dtype).requires_grad(false));
  const c10::SymInt padding = sizes[0] - shard.rows;
  if (padding != 0) unsharded_grad.narrow_symint(0, shard.rows, padding).zero_();
  return unsharded_grad;
}

Tensor reduce_gradient(const Tensor& unsharded_grad, const WeightShard& shard, const GradientTarget& target) {
  if (target.main_grad) {
    ops::reduce_gradient_out(unsharded_grad, target.weight, *target.main_grad, target.accumulate, shard.key);
    return {};
  }
  if (can_be_asynchronous(shard, unsharded_grad, target)) {
    accumulate_asynchronously(unsharded_grad, shard, target.weight);
    return {};
  }
  return ops::start_reduce_gradient(unsharded_grad, target.weight, shard.key);
}

Tensor finish_gradient(const Tensor& work, const Tensor& unsharded_grad, const Tensor& weight,
                       const WeightShard& shard, const Tensor& depends_on) {
  return ops::finish_reduce_gradient(work, unsharded_grad, weight, shard.key, as_optional(depends_on));
}

}  // namespace transformer_plugin::sharded
