// The slot of each (token, k) in an expert-major layout of fixed capacity: shared by permute and
// expert_parallel. The layout is described in slots_args.h.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>

#include "common/check.h"
#include "routing/slots_args.h"

namespace transformer_plugin::routing {

// All tensors are on the device of the indices.
struct Slots {
  at::Tensor slot;  // int32 [tokens, topk]: row of the layout, or -1 (no expert of it, or past the capacity)
  at::Tensor source;    // int32 [capacity]: token of each row, or -1 (padding or unused)
  at::Tensor source_k;  // int32 [capacity]: k of each row, or -1; undefined if not requested
  at::Tensor
      group_sizes;   // int64 [experts]: rows of each expert with padding; their sum is at most the capacity
  at::Tensor total;  // int64 [1]: the sum of the padded sizes before rows were dropped
  at::Tensor probs;  // float32 [capacity]: weight of each row, 0 without a token; undefined without weights
};

// What indices may name: the experts of all ranks, of which the layout has some.
struct NamedExperts {
  int64_t all;
  const char* advice = "Name an expert, or pass -1 for none";  // of the error about others
};

// Checks the arguments and allocates the outputs but `probs`, for every backend.
Slots empty_slots(const Argument& indices, int64_t first, int64_t experts, const c10::SymInt& capacity,
                  int64_t alignment, bool with_k);

// `indices` [tokens, topk], int32 or int64. Only experts first, ..., first + experts - 1 get rows. Without `named` the
// caller has checked the indices. Runs on the device of the indices; on CUDA the host reads nothing, and the
// work can be captured in a graph.
// `weights`: float32 [tokens, topk] on the same device; with them, the result has `probs`, with the bits of
// weights_to_slots (rows.h).
Slots assign_slots(const Argument& indices, int64_t first, int64_t experts, int64_t capacity,
                   int64_t alignment, bool with_k, const std::optional<NamedExperts>& named,
                   const std::optional<at::Tensor>& weights = std::nullopt);

}  // namespace transformer_plugin::routing
