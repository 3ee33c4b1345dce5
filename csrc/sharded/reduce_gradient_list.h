// The gradients of several matrices [n, K], each of which is sharded over ranks by rows: one sum for all of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "sharded/weight_shard.h"

namespace transformer_plugin::sharded {

// Where the sums go.
struct ListTarget {
  std::vector<at::Tensor> matrices;        // this rank's shards; undefined: no gradient is needed
  std::vector<at::Tensor> main_grad = {};  // buffers to write; otherwise the gradients
  bool accumulate = true;                  // or write over what the buffers hold
};

// A tensor of the sizes of a stack of this rank's shards [n, K], for ops that read sizes and dtype only. A single shard may be
// [1, n, K].
at::Tensor stack_like(at::TensorList matrices);
// A buffer for the gradients of the unsharded matrices as this rank computes them, [G, ranks * n, K], with rows of zeros last.
at::Tensor gradient_stack(at::TensorList matrices, const WeightShard& shard, at::ScalarType dtype);
// The same in the order of the ranks, [ranks * G, n, K].
at::Tensor shards_of_stack(at::Tensor stack, const WeightShard& shard);
// Begins the sum on a side stream, if nothing waits for a gradient before the end of the backward.
bool reduce_asynchronously(const at::Tensor& unsharded_grad, const WeightShard& shard,
                           const ListTarget& target);
// Adds sums [G, n, K] to the buffers, or writes them.
void write_sums(const at::Tensor& sums, const ListTarget& target);

}  // namespace transformer_plugin::sharded
