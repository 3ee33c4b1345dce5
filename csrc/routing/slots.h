// Where each (token, k) of a routing goes in an expert-major layout of fixed capacity: shared by permute and
// by expert_parallel. The layout is described in slots_args.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include "common/check.h"
#include "routing/slots_args.h"

namespace transformer_plugin::routing {

// All on the device of the indices.
struct Slots {
  at::Tensor slot;      // int32 [tokens, topk]: row of the layout, or -1 (masked, or past the capacity)
  at::Tensor source;    // int32 [capacity]: token of each row, or -1 (padding, or no row)
  at::Tensor source_k;  // int32 [capacity]: k of each row, or -1; undefined where it is not asked for
  at::Tensor
      group_sizes;   // int64 [experts]: rows of each expert with padding; their sum is at most the capacity
  at::Tensor total;  // int64 [1]: the sum of the padded sizes before anything was cut
};

// Checks, and the tensors unfilled: the same for every backend.
Slots empty_slots(const Argument& indices, int64_t first, int64_t experts, const c10::SymInt& capacity,
                  int64_t alignment, bool with_k);

// `indices` [tokens, topk], int32 or int64. Only experts first, ..., first + experts - 1 get rows. CPU or
// CUDA, by the device of the indices; on CUDA nothing is read on the host, and the work can be captured in a
// graph.
Slots assign_slots(const Argument& indices, int64_t first, int64_t experts, int64_t capacity,
                   int64_t alignment, bool with_k);

}  // namespace transformer_plugin::routing
