// Where the products of a layer get a weight from (docs/notes/a-weight-over-ranks.md has the whole way of a sharded one):
//
//   plain      the weight itself, quantized in each forward
//   quantized  the tensors that quantize_weight made of it before (linear/quantized_weight.h)
//   sharded    all ranks: their shards are all-gathered in the forward, and in the backward again
//   external   another runtime, which unshards the weight in each direction (sharded/external_weight.h)
//
// A sharded weight may be quantized, too: ranks then exchange quantized shards.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <vector>

#include "common/buffers.h"
#include "linear/operands.h"
#include "sharded/weight_shard.h"

namespace transformer_plugin::linear {

// A weight as the data gradient reads it.
struct WeightForBackward {
  Quantized values;  // with transpose_b if it is columnwise
  // Several matrices without scales, as the forward saved them, or unsharded again.
  at::TensorList saved_matrices = {};
  std::vector<at::Tensor> unsharded_matrices = {};

  // Read in place of the data of `values`, if there are any.
  at::TensorList matrices() const {
    return unsharded_matrices.empty() ? saved_matrices : at::TensorList(unsharded_matrices);
  }
};

struct WeightSource {
  // The tensors of the weight, or this rank's shards of them. In the backward: the matrices that were saved, if any.
  at::TensorList tensors;
  OptionalList quantized;
  const sharded::WeightShard& shard;

  // The values of a weight of one tensor, all-gathered where it is sharded.
  at::Tensor values(bool backward) const;
  // The operand of the forward. With `backward` also what the backward needs, to be saved: of a sharded weight the shard.
  QuantizedWeight for_forward(const OperandFormats& formats, bool backward) const;
  // The operand of the data gradient. `saved`: QuantizedWeight::backward.
  WeightForBackward for_backward(const Quantized& saved, const OperandFormats& formats) const;
};

// For a backward without a data gradient: asks another runtime for its weight all the same, so that it sees the order of use.
// `main_grad`: the name under which save_shards saved the shards.
void announce_use_in_backward(torch::autograd::AutogradContext* ctx, const char* main_grad,
                              const sharded::WeightShard& shard);

}  // namespace transformer_plugin::linear
