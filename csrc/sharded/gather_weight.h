// The whole weight of a layer, from the parts that ranks have.
#pragma once

#include "common/quantized.h"
#include "sharded/weight_shard.h"

namespace transformer_plugin::sharded {

// The op gather_weight. `part`: one direction of this rank's part, or unquantized values.
Quantized gather_weight(const Quantized& part, const WeightShard& shard, bool backward);
// The same of values in the dtype of the weight.
at::Tensor gather_values(const at::Tensor& part, const WeightShard& shard, bool backward);
// The op gather_weight_list: the stack of whole matrices. `parts`: of each matrix this rank's rows, or one stack of one matrix.
at::Tensor gather_weight_list(at::TensorList parts, const WeightShard& shard, bool backward);

}  // namespace transformer_plugin::sharded
