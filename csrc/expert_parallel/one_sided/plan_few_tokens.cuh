// A whole plan in one block, for one chunk of tokens without bounds (PlanArgs::is_of_one_block). What depends on this rank's
// indices alone is computed while the counts of the ranks travel.
#pragma once

#include "expert_parallel/one_sided/plan_kernels.cuh"

namespace transformer_plugin::expert_parallel::one_sided {

// Puts the counts of the chunk, which are all of this rank. Called by all threads.
__device__ __forceinline__ void put_own_counts(const PlanArgs& args, const Chunk& chunk,
                                               const int32_t* counts) {
  const int columns = static_cast<int>(args.columns()), ranks = args.peers.ranks;
  for (int i = threadIdx.x; i < columns * ranks; i += kPlanThreads) {
    const int to = i / columns, column = i % columns;
    const int32_t count =
        column == args.wrong_place_column() ? __ldcg(&args.state->wrong_place) : counts[column];
    words_of(args, to, args.layout.counts[0])[args.peers.rank * columns + column] = count;
  }
  announce(args, PlanWait::kCounts, chunk.epoch);
}

template <typename Index>
__global__ void __launch_bounds__(kPlanThreads) few_tokens_kernel(const __grid_constant__ PlanArgs args) {
  __shared__ Chunk chunk;
  __shared__ TokenCounts tokens;
  __shared__ ExpertScan scan;
  __shared__ ReceiveMemory received;
  __shared__ uint32_t before_chunk[kMostPeers];  // nothing: there is one chunk
  int32_t* const counts = dynamic_words();
  const int experts = static_cast<int>(args.experts), ranks = args.peers.ranks, rank = threadIdx.x;
  const auto clear = [&](int count) {
    for (int i = threadIdx.x; i < count; i += kPlanThreads) counts[i] = 0;
  };
  const bool begins = begin_step(args, chunk, true, [&](Chunk& loaded) {
    load_experts<Index>(args, loaded);
    clear(static_cast<int>(args.columns()));
    if (rank < ranks) before_chunk[rank] = 0;
  });
  if (threadIdx.x == 0) distributed::count_begin(args.marks);
  if (begins) {
    count_chunk<true>(args, chunk, counts);
    put_own_counts(args, chunk, counts);
    if (threadIdx.x == 0) args.state->epoch = chunk.epoch;
    if (rank < ranks) chunk.sent_rows[rank] = counts[experts + rank];
    fill_unused(args.source, args.capacity);
    fill_unused(args.records, 3 * args.max_tokens * args.destinations());
    __syncthreads();
    clear(experts);
    number_records(args, chunk, before_chunk);
    // From slot 0 on for each expert; the first slots are added later.
    auto* const next = reinterpret_cast<uint32_t*>(counts);
    assign_slots(args, chunk, next);
    clear(experts);
    if (wait_for_ranks(args, PlanWait::kCounts, chunk.epoch)) {
      const Counts all = counts_of(args, 0);
      load_tokens(args, all, tokens);
      report_wrong_of_all_ranks(args, all);
      find_first_slots(args, all, next, scan);
      write_required(args, scan, tokens);
      for (int i = threadIdx.x; i < chunk.tokens * static_cast<int>(args.topk); i += kPlanThreads)
        if (chunk.slots[i] >= 0) chunk.slots[i] += static_cast<int32_t>(next[chunk.experts[i]]);
      if (rank < ranks) chunk.first_place[rank] = tokens.before[rank];
      __syncthreads();
      put_slots(args, chunk);
      put_sent_rows(args, chunk);
    }
  }
  __syncthreads();
  receive_slots(args, chunk, received);
}

}  // namespace transformer_plugin::expert_parallel::one_sided
