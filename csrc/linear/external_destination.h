// The gradient of a weight of another runtime, in whose buffers it is written (sharded/external_weight.h).
#pragma once

#include "linear/wgrad_destination.h"

namespace transformer_plugin::linear {

// `shards`: of the weight.
std::unique_ptr<WgradDestination> external_destination(const WeightInputs& weight,
                                                       std::vector<at::Tensor> shards,
                                                       const sharded::WeightShard& shard);

}  // namespace transformer_plugin::linear
