// Reports of wrong expert indices in kernels (expert_index_args.h).
#pragma once

#include "common/expert_index_args.h"

namespace transformer_plugin {

// Adds `count` wrong indices; one of them is at this place of its tensor. Called by one thread.
__device__ __forceinline__ void report_wrong_experts(const ExpertRange& range, int64_t count, int64_t place) {
  if (range.word == nullptr) return;
  range.word->place = place;
  range.word->experts = range.experts;
  __threadfence_system();
  atomicAdd(&range.word->count, static_cast<unsigned>(count));
}

// Counts the index at this place of its tensor if it is wrong. To be called once for each index.
__device__ __forceinline__ void report_wrong_expert(const ExpertRange& range, int64_t index, int64_t place) {
  if (range.allows(index)) return;
  const unsigned lanes = __activemask();
  const unsigned lower_lanes = (1u << threadIdx.x % 32) - 1;
  if ((lanes & lower_lanes) != 0) return;  // one lane reports for all
  report_wrong_experts(range, __popc(lanes), place);
}

}  // namespace transformer_plugin
