// The counts of a plan: count_kernel (plan_kernels.cuh).
#pragma once

#include "expert_parallel/one_sided/plan_chunk.cuh"

namespace transformer_plugin::expert_parallel::one_sided {

// `words`: aligned to 16 bytes.
__device__ __forceinline__ void fill_unused(int32_t* words, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kPlanThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kPlanThreads + threadIdx.x, units = count / 4;
  for (int64_t i = first; i < units; i += step) reinterpret_cast<int4*>(words)[i] = int4{-1, -1, -1, -1};
  if (first < count - units * 4) words[units * 4 + first] = -1;
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

// How the threads of the last block divide the counts of the chunks: four columns, a unit, of a segment of the chunks for each.
struct ChunkSegments {
  int units, segments, chunks, of_segment;

  __device__ __forceinline__ explicit ChunkSegments(const PlanArgs& args)
      : units(static_cast<int>(args.chunk_stride() / 4)),
        segments(units < kPlanThreads ? kPlanThreads / units : 1),
        chunks(static_cast<int>(gridDim.x)),
        of_segment((chunks + segments - 1) / segments) {}

  // Calls visit(i, unit, segment, first, last); i numbers the sums, by segment and unit. Called by all threads.
  template <typename Visit>
  __device__ __forceinline__ void visit(Visit visit_sum) const {
    for (int i = threadIdx.x; i < segments * units; i += kPlanThreads) {
      const int segment = i / units, begin = segment * of_segment, end = begin + of_segment;
      visit_sum(i, i % units, segment, begin < chunks ? begin : chunks, end < chunks ? end : chunks);
    }
  }
};

// By the last block: puts the counts of all chunks to all ranks, which the others wait for, and then replaces those of each chunk by
// those of the chunks before it. `sums`: shared memory.
__device__ __forceinline__ void put_counts(const PlanArgs& args, int which, uint32_t epoch, int4* sums) {
  const ChunkSegments all(args);
  int4* const table = reinterpret_cast<int4*>(args.chunk_counts[which]);
  all.visit([&](int i, int unit, int, int first, int last) {
    sums[i] = sum_chunks<false>(table + unit, all.units, first, last, int4{0, 0, 0, 0});
  });
  __syncthreads();
  const int32_t* const words = reinterpret_cast<const int32_t*>(sums);
  for (int column = threadIdx.x; column < args.columns(); column += kPlanThreads) {
    int32_t total = 0;
    for (int s = 0; s < all.segments; ++s) total += words[s * all.units * 4 + column];
    if (column == args.wrong_place_column()) total = __ldcg(&args.state->wrong_place);
    for (int r = 0; r < args.peers.ranks; ++r)
      words_of(args, r, args.layout.counts[which])[args.peers.rank * args.columns() + column] = total;
  }
  announce(args, which == 0 ? PlanWait::kCounts : PlanWait::kKeptCounts, epoch);
  all.visit([&](int, int unit, int segment, int first, int last) {
    int4 before{0, 0, 0, 0};
    for (int s = 0; s < segment; ++s) add_to(before, sums[s * all.units + unit]);
    sum_chunks<true>(table + unit, all.units, first, last, before);
  });
}

// Bytes of dynamic shared memory: a counter for each expert and rank, and then the sums of put_counts().
inline size_t count_kernel_bytes(const PlanArgs& args) {
  const int64_t counters = args.chunk_stride() * 4, sums = kPlanThreads * 16;
  return static_cast<size_t>(counters > sums ? counters : sums);
}

// Counts the experts and ranks of the chunk, and with `wrong` its wrong indices. `counts`: zeros, in shared memory. Called by all
// threads.
template <bool wrong>
__device__ __forceinline__ void count_chunk(const PlanArgs& args, Chunk& chunk, int32_t* counts) {
  const int topk = static_cast<int>(args.topk);
  for (int i = threadIdx.x; i < chunk.tokens * topk; i += kPlanThreads) {
    const int32_t expert = chunk.experts[i];
    if (expert >= 0) atomicAdd(&counts[expert], 1);
    if (!wrong || expert != kWrongExpert) continue;
    atomicAdd(&counts[args.wrong_count_column()], 1);
    atomicExch(&args.state->wrong_place, static_cast<int32_t>(chunk.begin) * topk + i);
  }
  find_ranks(args, chunk, [](int) { return true; });
  for (int rank = warp_in_block(); rank < args.peers.ranks; rank += kPlanWarps) {
    const int count = visit_tokens(chunk, rank, [](int, int) {});
    if (lane_in_warp() == 0) counts[args.experts + rank] = count;
  }
  __syncthreads();
}

// `kept`: once more, without the tokens past the bound.
template <typename Index, bool kept>
__global__ void __launch_bounds__(kPlanThreads) count_kernel(const __grid_constant__ PlanArgs args) {
  __shared__ Chunk chunk;
  __shared__ TokenCounts tokens;
  int32_t* const counts = dynamic_words();
  const int stride = static_cast<int>(args.chunk_stride());
  const bool begins = begin_step(args, chunk, !kept, [&](Chunk& loaded) {
    load_experts<Index>(args, loaded);
    for (int i = threadIdx.x; i < stride; i += kPlanThreads) counts[i] = 0;
  });
  if (!kept && blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) distributed::count_begin(args.marks);
  if (!begins) return;
  if constexpr (kept) {
    if (!wait_for_ranks(args, PlanWait::kCounts, chunk.epoch)) return;
    load_tokens(args, counts_of(args, 0), tokens);
    if (!is_past_bound(args, tokens)) return;
    drop_past_bound(args, chunk, tokens);
  } else {
    fill_unused(args.source, args.capacity);
    fill_unused(args.records, 3 * args.max_tokens * args.destinations());
  }
  count_chunk<!kept>(args, chunk, counts);
  int32_t* const of_chunk = args.chunk_counts[kept] + blockIdx.x * args.chunk_stride();
  for (int i = threadIdx.x; i < stride; i += kPlanThreads) __stcg(of_chunk + i, counts[i]);
  if (!is_last_block(args.state, chunk, false)) return;
  if (!kept && threadIdx.x == 0) args.state->epoch = chunk.epoch;  // all blocks have read it
  put_counts(args, kept, chunk.epoch, reinterpret_cast<int4*>(counts));
}

}  // namespace transformer_plugin::expert_parallel::one_sided
