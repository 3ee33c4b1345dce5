// A weight of another runtime, written in Python, that gathers it before a product and takes its gradient afterwards. The three
// functions call ops of the namespace transformer_plugin_foreign, which transformer_plugin/parallel/foreign.py defines.
#pragma once

#include <ATen/core/Tensor.h>

#include "sharded/weight_shard.h"

namespace transformer_plugin::sharded {

// The whole weight. `part`: this rank's, as the layer has it.
at::Tensor foreign_weight(const at::Tensor& part, const WeightShard& shard, bool backward);
// Where the gradient of the whole weight is written.
at::Tensor foreign_buffer(const at::Tensor& part, const WeightShard& shard, at::ScalarType dtype);
// What autograd gets for `part`; undefined if the runtime keeps the gradient.
at::Tensor foreign_gradient(const at::Tensor& whole, const at::Tensor& part, const WeightShard& shard);

}  // namespace transformer_plugin::sharded
