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

WeightShard checked(TensorList shards, std::string_view shard_key) {
  WeightShard shard = parse_weight_shard(kOp, shard_key);
  TP_CHECK_VALUE(shard.is_sharded() && shard.is_list && !shard.is_external(), kOp, "shard",
                 "the key of matrices that are sharded over ranks, with 'list'", "'" << shard_key << "'",
                 "Gather a single weight with gather_weight");
  TP_CHECK_VALUE(!shards.empty(), kOp, "shards", "at least one matrix", "an empty list",
                 "Pass this rank's rows of each matrix");
  const Argument first{kOp, "shards[0]", shards[0]};
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string name = entry("shards", i);
    const Argument local{kOp, name.c_str(), shards[i]};
    tensor_parallel::check_exchange(local, shard.ranks, shard.timeout_ms);
    check_dim(local, 2);
    check_contiguous(local);
    check_same_device(local, first);
    check_same_dtype(local, first);
    check_no_gradient(local, "Detach it: the layer that reads the weight has the gradient");
    TP_CHECK_VALUE(local.tensor.sym_sizes() == shards[0].sym_sizes(), kOp, name.c_str(),
                   "the sizes " << shards[0].sym_sizes() << " of 'shards[0]'", describe(local.tensor),
                   "Shard all matrices in the same way");
  }
  TP_CHECK_VALUE(
      shards[0].sym_size(0) * shard.ranks >= shard.rows, kOp, "shards[0]",
      "at least " << (shard.rows + shard.ranks - 1) / shard.ranks << " of the " << shard.rows << " rows",
      describe(shards[0]), "Shard the matrices with zero rows after them");
  return shard;
}

Tensor gather_weight_list_kernel(TensorList shards, bool backward, std::string_view shard_key) {
  WeightShard shard = checked(shards, shard_key);
  const BelowAutograd guard;
  if (shard.ranks == 1) return at::stack(shards).narrow(1, 0, shard.rows).contiguous();
  distributed::RankGroup group(kOp, shard.group, shard.timeout_ms, shards[0]);
  GroupWeights& weights = GroupWeights::of(group.state());
  Tensor unsharded = weights.gathers.take({shards.vec(), {}, false, backward, std::move(shard), true})[0];
  weights.reductions.enqueue();
  return unsharded;
}

Tensor gather_weight_list_meta(TensorList shards, bool, std::string_view shard_key) {
  const WeightShard shard = checked(shards, shard_key);
  const c10::SymInt count(static_cast<int64_t>(shards.size()));
  return empty(shards[0], {count, c10::SymInt(shard.rows), shards[0].sym_size(1)}, shards[0].scalar_type());
}

}  // namespace

Tensor gather_weight_list(TensorList shards, const WeightShard& shard, bool backward) {
  if (shards.size() > 1 || shards[0].dim() == 2) return ops::gather_weight_list(shards, backward, shard.key);
  const Tensor local = shards[0].squeeze(0);
  return ops::gather_weight_list(local, backward, shard.key);
}

TP_IMPL_NO_GRADIENT(gather_weight_list, gather_weight_list_kernel, gather_weight_list_meta);

}  // namespace transformer_plugin::sharded
