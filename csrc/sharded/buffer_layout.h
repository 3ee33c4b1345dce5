// How the tensors of a quantized weight are made of those that each rank quantized from its rows.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "common/format.h"

namespace transformer_plugin::sharded {

// One tensor of one direction: data, scales or amaxes.
struct BufferLayout {
  std::vector<int64_t> unsharded;  // sizes for the unsharded weight
  std::vector<int64_t> shard;      // and of one rank
  // The dimension along which the ranks' shards follow each other; -1: all ranks have the same, which is not gathered.
  int64_t axis = 0;
  int64_t rows = 1;   // of a matrix, in one entry along `axis`
  int64_t used = 0;   // entries of a shard along `axis` that hold values; the rest is padding
  int64_t valid = 0;  // and of the unsharded tensor

  bool is_gathered() const { return axis >= 0; }
  // Whether the shards, one after the other, are the unsharded tensor and rows of padding after it.
  bool is_joined() const { return axis == 0 && used == shard[0]; }
};

// The tensors of a weight [rows, K] or [rows, N, K] whose first dimension is sharded over `ranks` ranks. `data`: this rank's data
// along rows, or transposed, in `format`, which is "none" for values without a format. `count`: how many tensors it has.
std::vector<BufferLayout> buffer_layouts(const at::Tensor& data, size_t count, const Format& format,
                                         bool columnwise, int64_t rows, int64_t ranks);
// Writes the tensor from what was gathered, [ranks * shard], with zeros in its padding. Not where the shards are joined.
void assemble(const BufferLayout& layout, const at::Tensor& gathered, int64_t ranks, const at::Tensor& out);

}  // namespace transformer_plugin::sharded
