// The kernels of a plan by records (plan_args.h). Blocks of 512 threads; one block for each chunk of this rank's tokens.
//   count_kernel     counts the experts and the ranks of a chunk. The last block turns the counts of the chunks into those before
//                    each chunk, and puts the totals to all ranks. It also marks all slots and records as unused.
//   assign_kernel    waits for the counts of all ranks. One warp gives the indices of the chunk slots, in order. Then the rows of
//                    the chunk are numbered, and their slots are put to the ranks that get them.
//   number_kernel    the latter, where a capacity drops slots: after all chunks have their slots.
//   receive_kernel   waits for the slots from all ranks and copies them.
// Plans of few tokens have a kernel of their own (plan_few_tokens.cuh).
//
// Shared memory: one counter for each expert and rank, and the indices, slots and ranks of a chunk. Integer atomics do not
// change the result.
//
// What a rank puts is not overwritten while another may read it. Counts are read until kSlots is announced, and put for the next plan
// after kSlots of all ranks. Slots and numbers of rows are read until the end of receive_kernel, and put for the next plan after
// kCounts of all ranks, which they announce later.
#pragma once

#include "expert_parallel/one_sided/plan_count.cuh"
#include "expert_parallel/one_sided/plan_receive.cuh"

namespace transformer_plugin::expert_parallel::one_sided {

// Reads how many indices of each expert, and tokens to each rank, are before the chunk on this rank.
__device__ __forceinline__ void load_before_chunk(const PlanArgs& args, int which, uint32_t* before) {
  const int32_t* const of_chunk = args.chunk_counts[which] + blockIdx.x * args.chunk_stride();
  for (int i = threadIdx.x; i < args.columns(); i += kPlanThreads)
    before[i] = static_cast<uint32_t>(of_chunk[i]);
}

// Turns next[e], the indices of each expert before the chunk on this rank, into the first slot of those of the chunk; one past the
// capacity becomes the capacity. The first block writes what the plan says about experts. Returns whether a rank needs more than
// the capacity.
__device__ __forceinline__ bool find_first_slots(const PlanArgs& args, const Counts& counts, uint32_t* next,
                                                 ExpertScan& shared) {
  const auto at_most = [&](int64_t slot) { return slot < args.capacity ? slot : args.capacity; };
  scan_experts(args, counts, shared, [&](int e, int rank, int64_t start, int64_t end, int64_t before) {
    next[e] = static_cast<uint32_t>(at_most(start + before + next[e]));
    if (blockIdx.x != 0) return;
    args.first_slots[e] = static_cast<int32_t>(at_most(start));
    if (rank == args.peers.rank)
      args.tokens_per_expert[e - rank * args.local_experts()] = at_most(end) - at_most(start);
  });
  const int rank = threadIdx.x;
  const bool is_over = __syncthreads_or(rank < args.peers.ranks && shared.rows(rank) > args.capacity);
  if (blockIdx.x == 0 && threadIdx.x == 0) args.first_slots[args.experts] = is_over;
  return is_over;
}

// Gives the indices of the chunk slots, in order: by one warp, 32 at a time.
__device__ __forceinline__ void assign_slots(const PlanArgs& args, Chunk& chunk, uint32_t* next) {
  constexpr int kAtOnce = 4;
  const int pairs = chunk.tokens * static_cast<int>(args.topk);
  for (int first = lane_in_warp(); warp_in_block() == 0 && first - lane_in_warp() < pairs;
       first += kAtOnce * kWarpSize) {
    int experts[kAtOnce];
    unsigned same[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int i = first + u * kWarpSize;
      experts[u] = i < pairs ? chunk.experts[i] : -1;
      same[u] = __match_any_sync(kWholeWarp, experts[u]);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int i = first + u * kWarpSize, leader = __ffs(static_cast<int>(same[u])) - 1;
      uint32_t begin = 0;
      if (experts[u] >= 0 && lane_in_warp() == leader)
        begin = atomicAdd(&next[experts[u]], static_cast<unsigned>(__popc(same[u])));
      __syncwarp();  // before the atomics of the next 32
      const uint32_t slot = __shfl_sync(kWholeWarp, begin, leader) + __popc(same[u] & lower_lanes());
      const bool is_kept = experts[u] >= 0 && slot < static_cast<uint64_t>(args.capacity);
      if (i < pairs) chunk.slots[i] = is_kept ? static_cast<int32_t>(slot) : -1;
    }
  }
  __syncthreads();
}

// Numbers the rows of the chunk, from before_chunk[r] on for rank r, and writes the records but for their slots. chunk.ranks and
// sent_rows are known. Called by all threads.
__device__ __forceinline__ void number_records(const PlanArgs& args, Chunk& chunk,
                                               const uint32_t* before_chunk) {
  const int ranks = args.peers.ranks, destinations = static_cast<int>(args.destinations());
  for (int i = threadIdx.x; i < chunk.tokens * destinations; i += kPlanThreads) chunk.destinations[i] = -1;
  if (threadIdx.x < ranks) {
    int32_t first = 0;
    for (int r = 0; r < static_cast<int>(threadIdx.x); ++r) first += chunk.sent_rows[r];
    chunk.first_record[threadIdx.x] = first;
  }
  __syncthreads();
  for (int rank = warp_in_block(); rank < ranks; rank += kPlanWarps) {
    const int32_t first = chunk.first_record[rank] + static_cast<int32_t>(before_chunk[rank]);
    visit_tokens(chunk, rank, [&](int t, int n) {
      const int i = t * destinations + chunk.ranks[t].before(rank);
      chunk.records[i] = first + n;
      chunk.destinations[i] = static_cast<int8_t>(rank);
    });
  }
  __syncthreads();
  int32_t* const tokens = args.records + args.max_tokens * destinations;
  for (int i = threadIdx.x; i < chunk.tokens * destinations; i += kPlanThreads) {
    if (chunk.destinations[i] < 0) continue;
    const int record = chunk.records[i];
    args.records[chunk.begin * destinations + i] = record;
    tokens[record] = static_cast<int32_t>(chunk.begin) + i / destinations;
  }
}

// Puts the slots of the numbered rows of the chunk. chunk.first_place is known. Called by all threads.
__device__ __forceinline__ void put_slots(const PlanArgs& args, Chunk& chunk) {
  const int topk = static_cast<int>(args.topk), local = static_cast<int>(args.local_experts());
  const int destinations = static_cast<int>(args.destinations());
  const auto is_slot_at = [&](int pair, int rank) {
    return chunk.slots[pair] >= 0 && chunk.experts[pair] / local == rank;
  };
  int32_t* const first_slots = args.records + 2 * args.max_tokens * destinations;
  for (int i = threadIdx.x; i < chunk.tokens * destinations; i += kPlanThreads) {
    const int to = chunk.destinations[i];
    if (to < 0) continue;
    int pair = i / destinations * topk;
    while (!is_slot_at(pair, to)) ++pair;  // there is one, or there were no record
    first_slots[chunk.records[i]] = chunk.slots[pair];
  }
  for (int i = threadIdx.x; i < chunk.tokens * destinations * topk; i += kPlanThreads) {
    const int row = i / topk, k = i % topk, to = chunk.destinations[row];
    if (to < 0) continue;
    const int pair = row / destinations * topk + k;
    const int64_t place = chunk.first_place[to] + chunk.records[row] - chunk.first_record[to];
    words_of(args, to, args.layout.slots)[place * topk + k] = is_slot_at(pair, to) ? chunk.slots[pair] : -1;
  }
}

// Puts how many rows this rank sends to each rank, after all slots are put. Called by all threads.
__device__ __forceinline__ void put_sent_rows(const PlanArgs& args, const Chunk& chunk) {
  const int ranks = args.peers.ranks;
  for (int i = threadIdx.x; i < ranks * ranks; i += kPlanThreads) {
    const int at = i / ranks, to = i % ranks;
    words_of(args, at, args.layout.sent)[args.peers.rank * ranks + to] = chunk.sent_rows[to];
  }
  announce(args, PlanWait::kSlots, chunk.epoch);
}

// By the last block. Called by all threads.
__device__ __forceinline__ void finish_slots(const PlanArgs& args, Chunk& chunk) {
  if (is_last_block(args.state, chunk, true)) put_sent_rows(args, chunk);
}

// By the first block: what the plan says about all ranks, by the first counts. Called by all threads.
__device__ __forceinline__ void write_required(const PlanArgs& args, const ExpertScan& scan,
                                               const TokenCounts& tokens) {
  const int rank = threadIdx.x, ranks = args.peers.ranks;
  if (rank < ranks) {
    args.required[rank] = scan.rows(rank);
    args.required_tokens[rank] = tokens.all[rank];
  }
  if (threadIdx.x != 0) return;
  int64_t most_rows = 0, most_tokens = 0;
  for (int r = 0; r < ranks; ++r) {
    most_rows = scan.rows(r) > most_rows ? scan.rows(r) : most_rows;
    most_tokens = tokens.all[r] > most_tokens ? tokens.all[r] : most_tokens;
  }
  const bool past_bound = args.bound >= 0 && most_tokens > args.bound,
             past_capacity = most_rows > args.capacity;
  *args.overflow = past_bound || past_capacity;
  if (!args.report || !(past_bound || past_capacity)) return;
  *static_cast<volatile int64_t*>(args.report) = past_bound ? -most_tokens : most_rows;
  __threadfence_system();
}

// By the first block: every rank reports the wrong indices of all ranks, as with gathered indices. Called by all threads.
__device__ __forceinline__ void report_wrong_of_all_ranks(const PlanArgs& args, const Counts& counts) {
  const int ranks = args.peers.ranks, rank = threadIdx.x;
  if (!__syncthreads_or(rank < ranks && counts.of(rank, args.wrong_count_column()) != 0) || rank != 0) return;
  int64_t wrong = 0, place = 0;
  for (int r = ranks - 1; r >= 0; --r) {
    const int32_t of_rank = counts.of(r, args.wrong_count_column());
    if (of_rank != 0) place = r * args.max_tokens * args.topk + counts.of(r, args.wrong_place_column());
    wrong += of_rank;
  }
  report_wrong_experts(args.range, wrong, place);
}

template <typename Index>
__global__ void __launch_bounds__(kPlanThreads) assign_kernel(const __grid_constant__ PlanArgs args) {
  __shared__ Chunk chunk;
  __shared__ TokenCounts tokens;
  __shared__ ExpertScan scan;
  uint32_t* const next = reinterpret_cast<uint32_t*>(dynamic_words());  // of each expert; then of each rank
  const bool begins = begin_step(args, chunk, false, [&](Chunk& loaded) {
    load_experts<Index>(args, loaded);
    load_before_chunk(args, 0, next);
  });
  if (!begins) return;
  if (!wait_for_ranks(args, PlanWait::kCounts, chunk.epoch)) return;
  load_tokens(args, counts_of(args, 0), tokens);
  const bool drops_tokens = is_past_bound(args, tokens), writes = blockIdx.x == 0;
  if (writes) report_wrong_of_all_ranks(args, counts_of(args, 0));
  if (drops_tokens) {
    if (writes) {
      scan_experts(args, counts_of(args, 0), scan, [](int, int, int64_t, int64_t, int64_t) {});
      write_required(args, scan, tokens);
    }
    drop_past_bound(args, chunk, tokens);
    if (!wait_for_ranks(args, PlanWait::kKeptCounts, chunk.epoch)) return;
    load_before_chunk(args, 1, next);
    load_tokens(args, counts_of(args, 1), tokens);
  }
  const Counts counts = counts_of(args, drops_tokens);
  const bool drops_slots = find_first_slots(args, counts, next, scan);
  if (writes && !drops_tokens) write_required(args, scan, tokens);
  assign_slots(args, chunk, next);
  find_ranks(args, chunk, [&](int i) { return chunk.slots[i] >= 0; });
  const int rank = threadIdx.x, ranks = args.peers.ranks;
  if (!drops_slots) {
    if (rank < ranks) {
      chunk.sent_rows[rank] = tokens.own[rank];
      chunk.first_place[rank] = tokens.before[rank];
    }
    __syncthreads();
    number_records(args, chunk, next + args.experts);
    put_slots(args, chunk);
    return finish_slots(args, chunk);
  }
  for (int i = threadIdx.x; i < chunk.tokens * static_cast<int>(args.topk); i += kPlanThreads)
    args.own_slots[chunk.begin * args.topk + i] = chunk.slots[i];
  for (int r = warp_in_block(); r < ranks; r += kPlanWarps) {
    const int rows = visit_tokens(chunk, r, [](int, int) {});
    if (lane_in_warp() == 0) args.kept_rows[blockIdx.x * ranks + r] = rows;
  }
}

// Where a capacity drops slots: rows[q] = the rows of the memory of rank `to` that are for the slots from rank q: as many as q has
// tokens there, or slots, whichever are fewer. Called by a warp; all ranks compute the same.
__device__ __forceinline__ void bounded_rows(const PlanArgs& args, const Counts& counts, int to,
                                             int32_t* rows) {
  const int lane = lane_in_warp(), ranks = args.peers.ranks;
  const auto at_most = [&](int64_t slot) { return slot < args.capacity ? slot : args.capacity; };
  for (int q = lane; q < ranks; q += kWarpSize) rows[q] = 0;
  __syncwarp();
  const int local = static_cast<int>(args.local_experts());
  for (int first = 0; first < local; first += kWarpSize) {
    const bool is_expert = first + lane < local;
    const int e = to * local + first + lane;
    int64_t begin = is_expert ? args.first_slots[e] : 0;
#pragma unroll 8
    for (int q = 0; q < ranks; ++q) {
      const int64_t end = begin + (is_expert ? counts.of(q, e) : 0);
      const auto slots = static_cast<uint32_t>(at_most(end) - at_most(begin));
      const auto sum = static_cast<int32_t>(__reduce_add_sync(kWholeWarp, slots));
      if (lane == 0) rows[q] += sum;
      begin = end;
    }
  }
  __syncwarp();
  for (int q = lane; q < ranks; q += kWarpSize) {
    const int32_t count = counts.tokens(q, to);
    rows[q] = rows[q] < count ? rows[q] : count;
  }
  __syncwarp();
}

// Sets chunk.first_place; the first block also keeps the places of what this rank receives. Called by all threads.
__device__ __forceinline__ void find_bounded_places(const PlanArgs& args, const Counts& counts,
                                                    Chunk& chunk) {
  __shared__ int32_t rows[kPlanWarps][kMostPeers];
  const int warp = warp_in_block(), lane = lane_in_warp(), me = args.peers.rank;
  for (int to = warp; to < args.peers.ranks; to += kPlanWarps) {
    bounded_rows(args, counts, to, rows[warp]);
    uint32_t before = 0;
    for (int q = lane; q < me; q += kWarpSize) before += static_cast<uint32_t>(rows[warp][q]);
    before = __reduce_add_sync(kWholeWarp, before);
    if (lane == 0) chunk.first_place[to] = static_cast<int32_t>(before);
    for (int r = lane; blockIdx.x == 0 && to == me && r < args.peers.ranks; r += kWarpSize) {
      int32_t place = 0;
      for (int q = 0; q < r; ++q) place += rows[warp][q];
      args.received_places[r] = place;
    }
    __syncwarp();
  }
}

template <typename Index>
__global__ void __launch_bounds__(kPlanThreads) number_kernel(const __grid_constant__ PlanArgs args) {
  __shared__ Chunk chunk;
  __shared__ TokenCounts tokens;
  __shared__ uint32_t before_chunk[kMostPeers];
  const int rank = threadIdx.x, ranks = args.peers.ranks;
  const bool begins = begin_step(args, chunk, false, [&](Chunk& loaded) {
    load_experts<Index>(args, loaded);
    if (rank >= ranks) return;
    loaded.sent_rows[rank] = 0;
    before_chunk[rank] = 0;
  });
  if (!begins || !drops_slots(args)) return;
  for (int i = threadIdx.x; i < chunk.tokens * static_cast<int>(args.topk); i += kPlanThreads)
    chunk.slots[i] = args.own_slots[chunk.begin * args.topk + i];
  for (int i = threadIdx.x; i < static_cast<int>(gridDim.x) * ranks; i += kPlanThreads) {
    const int32_t rows = args.kept_rows[i];
    atomicAdd(&chunk.sent_rows[i % ranks], rows);
    if (i / ranks < static_cast<int>(blockIdx.x))
      atomicAdd(&before_chunk[i % ranks], static_cast<uint32_t>(rows));
  }
  load_tokens(args, counts_of(args, 0), tokens);
  find_bounded_places(args, counts_of(args, is_past_bound(args, tokens)), chunk);
  find_ranks(args, chunk, [&](int i) { return chunk.slots[i] >= 0; });
  number_records(args, chunk, before_chunk);
  put_slots(args, chunk);
  finish_slots(args, chunk);
}

}  // namespace transformer_plugin::expert_parallel::one_sided
