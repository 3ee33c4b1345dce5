// The gradient of a weight that is sharded over ranks: each rank gets the sum over the ranks for its shard, for autograd or in its
// main_grad.
#pragma once

#include "linear/wgrad_destination.h"

namespace transformer_plugin::linear {

// `shards`: this rank's, one tensor, or of a list of matrices one for each.
std::unique_ptr<WgradDestination> reduce_scatter_destination(const WeightInputs& weight,
                                                             SavedMainGrad main_grad,
                                                             std::vector<at::Tensor> shards,
                                                             const sharded::WeightShard& shard);

}  // namespace transformer_plugin::linear
