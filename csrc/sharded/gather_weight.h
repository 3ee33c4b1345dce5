// The whole weight of a layer, from the parts that ranks have.
#pragma once

#include <string_view>

#include "common/quantized.h"
#include "sharded/weight_shard.h"

namespace transformer_plugin::sharded {

// The op gather_weight. `part`: one direction of this rank's part, or unquantized values.
Quantized gather_weight(const Quantized& part, std::string_view shard_key, bool backward);
// The op gather_weight_list: the stack of whole matrices. `parts`: of each matrix this rank's rows, or one stack of one matrix.
at::Tensor gather_weight_list(at::TensorList parts, std::string_view shard_key, bool backward);

}  // namespace transformer_plugin::sharded
