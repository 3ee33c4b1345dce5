// The plan of transports that send each row exactly once. A record is a row that one rank sends to one rank, itself included.
//
// Ranks exchange counts instead of indices: how many (token, k) each expert of the group has on each rank, and how many tokens
// each rank sends to each rank. From these every rank computes alike which slots its rows have at their destinations; the slots
// then travel, once, with the numbers of rows that are left after drops. Nothing grows with the number of ranks but the counts.
#pragma once

#include <ATen/core/Tensor.h>

#include "expert_parallel/group.h"
#include "expert_parallel/peer_rows.h"

namespace transformer_plugin::expert_parallel {

struct RecordPlanSizes {
  const char* op;
  int64_t experts, capacity, alignment;
  std::optional<int64_t> bound;  // of received tokens
  int64_t received_rows;         // N
  bool raise_on_overflow;

  // Of one call.
  int64_t collectives() const { return bound ? 4 : 3; }
};

// All on the device of the indices; int32 but for counts of int64.
struct RecordPlan {
  at::Tensor slot;               // [N, K]
  at::Tensor source;             // [capacity]
  at::Tensor tokens_per_expert;  // int64 [E / R]
  at::Tensor required;           // int64 [R]
  at::Tensor overflow;           // [1]
  at::Tensor peer_rows;          // [4, R + 1], see PeerRows
  at::Tensor records;            // [3, max_tokens, min(K, R)], see records_of_tokens()
  at::Tensor required_tokens;    // int64 [R]
};

// Raises the ValueError of a bound that a rank exceeds; `needed` [R] is on a CPU, the same on every rank.
void check_room(const char* op, const at::Tensor& needed, int64_t bound, const char* argument,
                const char* what);

// Raises a ValueError while a CUDA graph is captured from the stream of `tensor`, which the host is about to read.
void check_host_may_read(const char* op, const char* argument, const at::Tensor& tensor);

// `indices`: int32 [max_tokens, K] of this rank, past its tokens -1. The host reads it. After begin_call().
RecordPlan make_record_plan(const at::Tensor& indices, const RecordPlanSizes& sizes,
                            const ExpertParallelGroup& group);

// int32 [max_tokens, min(K, R)]: the records of each token, in ascending order of ranks, then -1.
at::Tensor records_of_tokens(const at::Tensor& records);
// int32 [max_tokens * min(K, R)]: the token of each record, then -1. After these come, likewise, the first slots of the records at the
// ranks they go to: of those of a (token, k) there, that of the least k.
at::Tensor tokens_of_records(const at::Tensor& records);

}  // namespace transformer_plugin::expert_parallel
