// A weight of another runtime, written in Python, that gathers it before a product and takes its gradient afterwards. The three
// functions call ops of the namespace transformer_plugin_external, which transformer_plugin/parallel/external.py defines.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "sharded/weight_shard.h"

namespace transformer_plugin::sharded {

// An unsharded weight: one tensor, or a matrix for each group; or, in the format of the layer, its tensors along one direction.
struct ExternalWeight {
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> quantized;  // data, scales and, of nvfp4, amaxes
  bool columnwise = false;
};

// `shards`: this rank's, as the layer has them, in whose dtype the values are. `format`: of the layer's weights.
ExternalWeight external_weight(at::TensorList shards, const WeightShard& shard, std::string_view format,
                               bool backward);
// Where the gradient of the unsharded weight is written, a tensor for each shard.
std::vector<at::Tensor> external_buffers(at::TensorList shards, const WeightShard& shard,
                                         at::ScalarType dtype);
// What autograd gets for each shard; undefined if the runtime keeps the gradient. `unsharded`: the buffers.
std::vector<at::Tensor> external_gradients(at::TensorList unsharded, at::TensorList shards,
                                           const WeightShard& shard);

}  // namespace transformer_plugin::sharded
