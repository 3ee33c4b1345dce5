// The weight of a layer that is sharded over ranks: what it may be, and what a node saves of it.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <vector>

#include "linear/weights.h"
#include "sharded/weight_shard.h"

namespace transformer_plugin::linear {

// What a weight that is sharded over ranks may have: a shard that is large enough, a buffer for each tensor and no queue.
void check_weight_shard(const WeightArgument& weight, const sharded::WeightShard& shard,
                        const MainGrad& main_grad, bool is_quantized = false);

// In the forward: saves the key, as the backward gathers the weight again. In the backward: the key, parsed.
void save_weight_shard(torch::autograd::AutogradContext* ctx, const sharded::WeightShard& shard);
sharded::WeightShard saved_weight_shard(const torch::autograd::AutogradContext* ctx);

// In the forward: saves this rank's shards of a weight whose gradient is needed. Untracked, as the gradient does not depend on
// their values. `name`: of the argument for its main_grad.
void save_shards(torch::autograd::AutogradContext* ctx, const char* name, at::TensorList weight,
                 const sharded::WeightShard& shard);
// In the backward: these shards, if they were saved.
std::vector<at::Tensor> saved_shards(torch::autograd::AutogradContext* ctx, const char* name,
                                     const sharded::WeightShard& shard);

}  // namespace transformer_plugin::linear
