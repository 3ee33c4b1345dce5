// The counts of a plan: count_kernel (plan_kernels.cuh).
#pragma once

#include "expert_parallel/one_sided/plan_chunk.cuh"

namespace transformer_plugin::expert_parallel::one_sided {

__device__ __forceinline__ void fill_unused(int32_t* words, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kPlanThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kPlanThreads + threadIdx.x; i < count; i += step)
    words[i] = -1;
}

__device__ __forceinline__ void add_to(int4& sum, const int4& value) {
  sum.x += value.x;
  sum.y += value.y;
  sum.z += value.z;
  sum.w += value.w;
}

// Four columns of the chunks first .. last - 1, from `before` on: returns their sum, and with `stores` replaces each by the sum of
// those before it. All loads of a dozen chunks are in flight.
template <bool stores>
__device__ __forceinline__ int4 sum_chunks(int4* of_column, int64_t stride, int first, int last,
                                           int4 before) {
  constexpr int kAtOnce = 12;
  for (int c = first; c < last; c += kAtOnce) {
    int4 values[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      values[u] = c + u < last ? __ldcg(of_column + (c + u) * stride) : int4{0, 0, 0, 0};
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      if (stores && c + u < last) __stcg(of_column + (c + u) * stride, before);
      add_to(before, values[u]);
    }
  }
  return before;
}

// By the last block: replaces the counts of each chunk by those of the chunks before it, and puts the totals to all ranks. A thread
// has four columns of a segment of the chunks. `sums`: shared memory.
__device__ __forceinline__ void scan_chunks(const PlanArgs& args, int which, int4 (&sums)[kPlanThreads]) {
  const int units = static_cast<int>(args.chunk_stride() / 4), chunks = static_cast<int>(gridDim.x);
  const int segments = units < kPlanThreads ? kPlanThreads / units : 1;
  const int at_once = units < kPlanThreads ? units : kPlanThreads;
  const int of_segment = (chunks + segments - 1) / segments, columns = static_cast<int>(args.columns());
  const int segment = threadIdx.x / at_once;
  const int begin = segment * of_segment, end = begin + of_segment;
  const int first = begin < chunks ? begin : chunks, last = end < chunks ? end : chunks;
  int4* const table = reinterpret_cast<int4*>(args.chunk_counts[which]);
  for (int unit = threadIdx.x % at_once; unit < units || segments > 1; unit += kPlanThreads) {
    int4 before{0, 0, 0, 0};
    if (segments > 1) {  // all threads come here once
      if (segment < segments) sums[threadIdx.x] = sum_chunks<false>(table + unit, units, first, last, before);
      __syncthreads();
      for (int s = 0; s < segment && segment < segments; ++s) add_to(before, sums[s * at_once + unit]);
    }
    if (segment < segments) {
      const int4 all = sum_chunks<true>(table + unit, units, first, last, before);
      const int32_t words[4] = {all.x, all.y, all.z, all.w};
      for (int r = 0; segment == segments - 1 && r < args.peers.ranks; ++r) {
        int32_t* const to = words_of(args, r, args.layout.counts[which]) + args.peers.rank * args.columns();
        for (int w = 0; w < 4 && unit * 4 + w < columns; ++w) to[unit * 4 + w] = words[w];
      }
    }
    if (segments > 1) break;
  }
}

// `kept`: once more, without the tokens past the bound.
template <typename Index, bool kept>
__global__ void __launch_bounds__(kPlanThreads) count_kernel(const __grid_constant__ PlanArgs args) {
  __shared__ Chunk chunk;
  __shared__ TokenCounts tokens;
  __shared__ int4 sums[kPlanThreads];
  int32_t* const counts = dynamic_words();
  const int stride = static_cast<int>(args.chunk_stride());
  const bool begins = begin_step(args, chunk, !kept, [&](Chunk& loaded) {
    load_experts<Index>(args, loaded, !kept);
    for (int i = threadIdx.x; i < stride; i += kPlanThreads) counts[i] = 0;
  });
  if (!begins) return;
  if constexpr (kept) {
    if (!wait_for_ranks(args, PlanWait::kCounts, chunk.epoch)) return;
    load_tokens(args, counts_of(args, 0), tokens);
    if (!is_past_bound(args, tokens)) return;
    drop_past_bound(args, chunk, tokens);
  } else {
    fill_unused(args.source, args.capacity);
    fill_unused(args.records, 2 * args.max_tokens * args.destinations());
  }
  for (int i = threadIdx.x; i < chunk.tokens * static_cast<int>(args.topk); i += kPlanThreads)
    if (chunk.experts[i] >= 0) atomicAdd(&counts[chunk.experts[i]], 1);
  find_ranks(args, chunk, [](int) { return true; });
  for (int rank = warp_in_block(); rank < args.peers.ranks; rank += kPlanWarps) {
    const int count = visit_tokens(chunk, rank, [](int, int) {});
    if (lane_in_warp() == 0) counts[args.experts + rank] = count;
  }
  __syncthreads();
  int32_t* const of_chunk = args.chunk_counts[kept] + blockIdx.x * args.chunk_stride();
  for (int i = threadIdx.x; i < stride; i += kPlanThreads) __stcg(of_chunk + i, counts[i]);
  if (!is_last_block(args.state, chunk, false)) return;
  if (!kept && threadIdx.x == 0) args.state->epoch = chunk.epoch;  // all blocks have read it
  scan_chunks(args, kept, sums);
  announce(args, kept ? PlanWait::kKeptCounts : PlanWait::kCounts, chunk.epoch);
}

}  // namespace transformer_plugin::expert_parallel::one_sided
