// The gradient of a weight that is sharded over ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "sharded/weight_shard.h"

namespace transformer_plugin::sharded {

// Where the sum of the ranks' gradients goes.
struct GradientTarget {
  at::Tensor weight;                         // this rank's part, which the gradient belongs to
  std::optional<at::Tensor> main_grad = {};  // the buffer to write; otherwise the gradient is returned
  bool accumulate = true;                    // or write over what the buffer holds
};

// A buffer for the gradient of the whole weight as this rank computes it, with rows of zeros after it, which reduce_gradient
// takes: [ranks * n, ...] for a part [n, ...].
at::Tensor gradient_parts(const at::Tensor& weight, const WeightShard& shard, at::ScalarType dtype);

// Begins to add the ranks' gradients, each rank those of its rows, on a side stream. Undefined if they go into a buffer, or
// into `weight.grad` until the end of the backward. Otherwise a token, for which finish_gradient gives the result.
at::Tensor reduce_gradient(const at::Tensor& parts, std::string_view shard_key, const GradientTarget& target);

// `after`: what the node computes meanwhile, or undefined. A compiler that orders ops by their operands would wait at once.
at::Tensor finish_gradient(const at::Tensor& token, const at::Tensor& parts, const at::Tensor& weight,
                           std::string_view shard_key, const at::Tensor& after);

}  // namespace transformer_plugin::sharded
