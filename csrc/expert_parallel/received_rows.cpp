// By ops of torch: a plan makes this once, of a few bytes for each token.
#include "expert_parallel/received_rows.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

namespace transformer_plugin::expert_parallel {

using at::Tensor;

Tensor count_distinct_tokens(const Tensor& indices, int64_t experts, int64_t ranks) {
  const Tensor is_expert = indices.ge(0).logical_and_(indices.lt(experts));
  const Tensor rank = at::where(is_expert, indices.div(experts / ranks, "floor"), ranks).to(at::kLong);
  const Tensor named = at::zeros({indices.size(0), ranks + 1}, indices.options().dtype(at::kBool));
  return named.scatter_(1, rank, true).narrow(1, 0, ranks).sum(0, /*keepdim=*/false, at::kLong);
}

Tensor drop_tokens_past(const Tensor& indices, int64_t first, int64_t experts, int64_t bound) {
  const Tensor mine = indices.ge(first).logical_and_(indices.lt(first + experts));
  const Tensor past = mine.any(1).cumsum(0, at::kInt).gt(bound).unsqueeze(1);
  return indices.masked_fill(mine.logical_and(past), -1);
}

CompactRows compact_rows(const Tensor& slot, const Tensor& source, int64_t rows) {
  if (slot.size(0) == 0) return {slot, source, slot.new_empty({0}), slot.new_empty({0})};
  const Tensor used = slot.ge(0).any(1);
  const Tensor count = used.cumsum(0, at::kInt);
  CompactRows compact;
  compact.position = at::where(used, count.sub(1), -1);
  // The token at which the count reaches 1, 2, ...; past the last one there is none.
  const Tensor numbers = at::arange(1, rows + 1, slot.options());
  const Tensor token = at::searchsorted(count, numbers, /*out_int32=*/true);
  const Tensor is_unused = token.ge(slot.size(0));
  compact.received = token.masked_fill(is_unused, -1);
  compact.slot =
      slot.index_select(0, token.clamp_max(slot.size(0) - 1)).masked_fill_(is_unused.unsqueeze(1), -1);
  compact.source = at::where(source.ge(0), compact.position.index_select(0, source.clamp_min(0)), -1);
  return compact;
}

}  // namespace transformer_plugin::expert_parallel
