// Gradients of several matrices that are sharded over ranks (sharded/reduce_gradient_list.h).
#include "sharded/reduce_gradient_list.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "common/autograd.h"
#include "common/check.h"
#include "sharded/reduce_gradient.h"

namespace transformer_plugin::sharded {
namespace {

using at::Tensor;

// Into each `grad`.
void add_to_gradients(const Tensor& sums, const std::vector<Tensor>& matrices) {
  for (size_t i = 0; i < matrices.size(); ++i) {
    if (matrices[i].defined()) add_to_gradient(matrices[i], sums.select(0, static_cast<int64_t>(i)));
  }
}

}  // namespace

Tensor stack_like(at::TensorList matrices) {
  const Tensor first = matrices[0].detach();
  if (first.dim() == 3) return first;
  const c10::SymInt count(static_cast<int64_t>(matrices.size()));
  return first.unsqueeze(0).expand_symint({count, first.sym_size(0), first.sym_size(1)});
}

Tensor gradient_stack(at::TensorList matrices, const WeightShard& shard, at::ScalarType dtype) {
  const Tensor& first = matrices[0];
  const c10::SymInt count(static_cast<int64_t>(matrices.size())), rows = first.sym_size(-2) * shard.ranks;
  const auto options = first.options().dtype(dtype).requires_grad(false);
  const Tensor stack = at::empty_symint({count, rows, first.sym_size(-1)}, options);
  const c10::SymInt padding = rows - shard.rows;
  if (padding != 0) stack.narrow_symint(1, shard.rows, padding).zero_();
  return stack;
}

Tensor shards_of_stack(Tensor stack, const WeightShard& shard) {
  const c10::SymInt rows = stack.sym_size(1) / shard.ranks;
  return stack.unflatten_symint(1, {c10::SymInt(shard.ranks), rows})
      .transpose(0, 1)
      .contiguous()
      .flatten(0, 1);
}

bool reduce_asynchronously(const Tensor& unsharded_grad, const WeightShard& shard, const ListTarget& target) {
  if (!shard.asynchronous || is_traced(unsharded_grad)) return false;
  const Tensor* first = nullptr;
  for (const Tensor& matrix : target.matrices) {
    if (!matrix.defined()) continue;
    if (is_observed(matrix) || (target.main_grad.empty() && !takes_sums(matrix))) return false;
    if (!first) first = &matrix;
  }
  if (!first) return false;
  const auto options = first->options().dtype(sum_dtype(unsharded_grad, *first)).requires_grad(false);
  const auto count = static_cast<int64_t>(target.matrices.size());
  const Tensor sums = at::empty({count, first->size(-2), first->size(-1)},
                                target.main_grad.empty() ? options : options.dtype(at::kFloat));
  submit(unsharded_grad, sums, false, shard, [sums, target] {
    if (target.main_grad.empty()) {
      add_to_gradients(sums, target.matrices);
    } else {
      write_sums(sums, target);
    }
  });
  return true;
}

void write_sums(const Tensor& sums, const ListTarget& target) {
  const at::AutoGradMode mode(false);
  for (size_t i = 0; i < target.matrices.size(); ++i) {
    if (!target.matrices[i].defined()) continue;
    Tensor buffer = target.main_grad[i];
    const Tensor sum = sums.select(0, static_cast<int64_t>(i)).view_as(buffer);
    // A tracer must not see an op that writes a buffer in place which does not begin where its memory does.
    buffer.copy_(target.accumulate ? at::add(buffer, sum) : sum);
  }
}

}  // namespace transformer_plugin::sharded
