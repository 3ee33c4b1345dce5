// The unsharded weight of a layer, from the shards that ranks have.
#pragma once

#include "common/quantized.h"
#include "sharded/weight_shard.h"

namespace transformer_plugin::sharded {

// The op gather_weight. `local`: one direction of this rank's shard, or unquantized values.
Quantized gather_weight(const Quantized& local, const WeightShard& shard, bool backward);
// The same of values in the dtype of the weight.
at::Tensor gather_values(const at::Tensor& local, const WeightShard& shard, bool backward);
// The op gather_weight_list: the stack of unsharded matrices. `shards`: of each matrix this rank's rows, or one stack of one matrix.
at::Tensor gather_weight_list(at::TensorList shards, const WeightShard& shard, bool backward);

}  // namespace transformer_plugin::sharded
