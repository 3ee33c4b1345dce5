// Arguments of the slot kernels, without torch.
//
// Slots are the rows of an expert-major layout of fixed capacity: all rows of the first expert, padded to a
// multiple of `alignment`, then all rows of the second, and so on. The rows of an expert are in the order of
// the indices: by token, then by k. Positions are counted, without sorting or races, so they are
// deterministic.
#pragma once

#include <cstdint>

#include "common/expert_index_args.h"
#include "common/math.h"

namespace transformer_plugin::routing {

// Limit of the counters of one thread block in shared memory.
inline constexpr int64_t kMaxExperts = 1024;

struct AssignSlotsArgs {
  const void* indices;  // [tokens, topk] int32 or int64; experts outside [first, first + experts) get no row
  bool indices_are_int64;
  int64_t tokens;
  int64_t topk;
  int64_t first;    // the first expert of the layout
  int64_t experts;  // number of experts in the layout
  int64_t capacity;
  int64_t alignment;
  int32_t* slot;         // [tokens, topk]: row of the layout, or -1 if masked or dropped
  int32_t* source;       // [capacity]: token of the row, or -1
  int32_t* source_k;     // [capacity]: k of the row, or -1. Or null
  int64_t* group_sizes;  // [experts]: rows with padding, without those past the capacity
  int64_t* total;        // [1]: rows with padding before any is dropped
  const float* weights;  // [tokens, topk]; null without probs
  float* probs;          // [capacity]: weight of the row's (token, k), 0 in a row without one. Or null
  // CUDA only, unless are_few(): the counts of chunks of the indices.
  int32_t* chunk_counts;  // [chunks, experts]
  int64_t chunks;
  int64_t chunk_size;
  ExpertRange range;  // of the indices

  TP_HOST_DEVICE int64_t items() const { return tokens * topk; }
  TP_HOST_DEVICE int64_t chunk_end(int64_t begin) const {
    return begin + chunk_size < items() ? begin + chunk_size : items();
  }
  // Whether one thread block can do all the work in a short time.
  TP_HOST_DEVICE bool are_few() const { return items() <= 4096 && capacity <= 32768; }
};

struct CountTokensArgs {
  const void* indices;  // int32 or int64, any shape
  bool indices_are_int64;
  int64_t numel;
  int64_t experts;
  int64_t* counts;  // [experts]
  ExpertRange range;
};

void assign_slots_cpu(const AssignSlotsArgs& args);
void launch_assign_slots(const AssignSlotsArgs& args, void* stream);
void count_tokens_cpu(const CountTokensArgs& args);
void launch_count_tokens(const CountTokensArgs& args, void* stream);

}  // namespace transformer_plugin::routing
