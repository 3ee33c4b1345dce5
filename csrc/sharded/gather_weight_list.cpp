// gather_weight_list: several matrices as one stack, from each rank's rows of every matrix, in one collective.
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include "common/autograd.h"
#include "common/buffers.h"
#include "common/ops/sharded.h"
#include "common/register.h"
#include "common/tensor.h"
#include "sharded/gather_weight.h"
#include "sharded/group_weights.h"
#include "tensor_parallel/exchange.h"

namespace transformer_plugin::sharded {
namespace {

using at::Tensor;
using at::TensorList;

constexpr const char* kOp = "gather_weight_list";

WeightShard checked(TensorList parts, std::string_view shard_key) {
  WeightShard shard = parse_weight_shard(kOp, shard_key);
  TP_CHECK_VALUE(shard.is_sharded() && shard.each && !shard.is_external(), kOp, "shard",
                 "the key of matrices that are sharded over ranks, with 'each'", "'" << shard_key << "'",
                 "Gather a single weight with gather_weight");
  TP_CHECK_VALUE(!parts.empty(), kOp, "parts", "at least one matrix", "an empty list",
                 "Pass this rank's rows of each matrix");
  const Argument first{kOp, "parts[0]", parts[0]};
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string name = entry("parts", i);
    const Argument part{kOp, name.c_str(), parts[i]};
    tensor_parallel::check_exchange(part, shard.ranks, shard.timeout_ms);
    check_dim(part, 2);
    check_contiguous(part);
    check_same_device(part, first);
    check_same_dtype(part, first);
    check_no_gradient(part, "Detach it: the layer that reads the weight has the gradient");
    TP_CHECK_VALUE(part.tensor.sym_sizes() == parts[0].sym_sizes(), kOp, name.c_str(),
                   "the sizes " << parts[0].sym_sizes() << " of 'parts[0]'", describe(part.tensor),
                   "Cut all matrices in the same way");
  }
  TP_CHECK_VALUE(
      parts[0].sym_size(0) * shard.ranks >= shard.rows, kOp, "parts[0]",
      "at least " << (shard.rows + shard.ranks - 1) / shard.ranks << " of the " << shard.rows << " rows",
      describe(parts[0]), "Cut the matrices with zero rows after them");
  return shard;
}

Tensor gather_weight_list_kernel(TensorList parts, bool backward, std::string_view shard_key) {
  WeightShard shard = checked(parts, shard_key);
  const BelowAutograd guard;
  if (shard.ranks == 1) return at::stack(parts).narrow(1, 0, shard.rows).contiguous();
  distributed::RankGroup group(kOp, shard.group, shard.timeout_ms, parts[0]);
  GroupWeights& weights = GroupWeights::of(group.state());
  Tensor whole = weights.gathers.take({parts.vec(), {}, false, backward, std::move(shard), true})[0];
  weights.reductions.enqueue();
  return whole;
}

Tensor gather_weight_list_meta(TensorList parts, bool, std::string_view shard_key) {
  const WeightShard shard = checked(parts, shard_key);
  const c10::SymInt count(static_cast<int64_t>(parts.size()));
  return empty(parts[0], {count, c10::SymInt(shard.rows), parts[0].sym_size(1)}, parts[0].scalar_type());
}

}  // namespace

Tensor gather_weight_list(TensorList parts, const WeightShard& shard, bool backward) {
  if (parts.size() > 1 || parts[0].dim() == 2) return ops::gather_weight_list(parts, backward, shard.key);
  const Tensor part = parts[0].squeeze(0);
  return ops::gather_weight_list(part, backward, shard.key);
}

TP_IMPL_NO_GRADIENT(gather_weight_list, gather_weight_list_kernel, gather_weight_list_meta);

}  // namespace transformer_plugin::sharded
