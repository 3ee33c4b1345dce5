// What the slot kernels take, without torch.
//
// Slots are the rows of an expert-major layout of fixed capacity: all rows of the first expert, padded up to
// `alignment`, then all of the second, and so on. Inside an expert the order is that of the indices: token,
// then k. The order is counted, never sorted or raced for, so it repeats bit for bit.
#pragma once

#include <cstdint>

#include "common/math.h"

namespace transformer_plugin::routing {

// Bounds the table of counts that one thread block keeps.
inline constexpr int64_t kMaxExperts = 1024;

struct AssignSlotsArgs {
  const void* indices;  // [tokens, topk] int32 or int64; anything outside [first, first + experts) is masked
  bool indices_are_int64;
  int64_t tokens;
  int64_t topk;
  int64_t first;    // the first expert of the layout
  int64_t experts;  // how many it holds
  int64_t capacity;
  int64_t alignment;
  int32_t* slot;         // [tokens, topk]: row of the layout, or -1 when masked or dropped
  int32_t* source;       // [capacity]: token of the row, or -1
  int32_t* source_k;     // [capacity]: k of the row, or -1. Or null
  int64_t* group_sizes;  // [experts]: rows with padding, cut where the capacity ends
  int64_t* total;        // [1]: rows with padding before anything was cut
  // CUDA only, and not of few: chunks of the indices are counted side by side, then scanned.
  int32_t* chunk_counts;  // [chunks, experts]
  int64_t* starts;        // [experts]: first row of each expert
  int64_t chunks;
  int64_t chunk_size;

  TP_HOST_DEVICE int64_t items() const { return tokens * topk; }
  TP_HOST_DEVICE int64_t chunk_end(int64_t begin) const {
    return begin + chunk_size < items() ? begin + chunk_size : items();
  }
  // Whether one thread block is soon done with all of it.
  TP_HOST_DEVICE bool are_few() const { return items() <= 512 && capacity <= 16384; }
};

struct CountTokensArgs {
  const void* indices;  // as above, any shape
  bool indices_are_int64;
  int64_t numel;
  int64_t experts;
  int64_t* counts;  // [experts]
};

void assign_slots_cpu(const AssignSlotsArgs& args);
void launch_assign_slots(const AssignSlotsArgs& args, void* stream);
void count_tokens_cpu(const CountTokensArgs& args);
void launch_count_tokens(const CountTokensArgs& args, void* stream);

}  // namespace transformer_plugin::routing
