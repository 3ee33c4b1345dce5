// What the kernels of a plan share: counts, waits, the end of a kernel, and the work of a block, which is a chunk of tokens.
#pragma once

#include "common/expert_index.cuh"
#include "common/launch.cuh"
#include "common/scan.cuh"
#include "distributed/progress.cuh"
#include "expert_parallel/one_sided/plan_args.h"
#include "expert_parallel/one_sided/system_memory.cuh"

namespace transformer_plugin::expert_parallel::one_sided {

inline constexpr int kPlanThreads = 512;
inline constexpr int kPlanWarps = kPlanThreads / kWarpSize;
inline constexpr int kMostPairs = 1024;                 // indices of a chunk
inline constexpr int kMostTokens = 512;                 // of a chunk
inline constexpr int kMaskWords = 3;                    // of 32 ranks each
inline constexpr int32_t kWrongExpert = kNoExpert - 1;  // of an index that is neither an expert nor kNoExpert
inline constexpr unsigned kWholeWarp = 0xffffffffu;
static_assert(kMostPeers <= 32 * kMaskWords && kMostPeers < kPlanThreads, "a bit and a thread for each rank");

// The ranks that a token goes to.
struct RankMask {
  uint32_t words[kMaskWords];

  __device__ __forceinline__ bool has(int rank) const { return words[rank / 32] >> rank % 32 & 1u; }
  // How many of its ranks are less.
  __device__ __forceinline__ int before(int rank) const {
    int count = 0;
    for (int w = 0; w < rank / 32; ++w) count += __popc(words[w]);
    return count + __popc(words[rank / 32] & ((1u << rank % 32) - 1));
  }
};

struct Chunk {
  int32_t experts[kMostPairs];  // expert of each index, kNoExpert or kWrongExpert
  int32_t slots[kMostPairs];
  RankMask ranks[kMostTokens];
  int32_t records[kMostPairs];       // [tokens, destinations]: the record to each rank of a token
  int8_t destinations[kMostPairs];   // that rank
  int32_t sent_rows[kMostPeers];     // of this rank to each rank
  int32_t first_record[kMostPeers];  // of them
  int32_t first_place[kMostPeers];   // of this rank's slots in the memory of each rank
  int32_t is_last;
  uint32_t epoch;
  int64_t begin;  // the first token
  int tokens;
};

__device__ __forceinline__ int lane_in_warp() { return threadIdx.x % kWarpSize; }
__device__ __forceinline__ int warp_in_block() { return threadIdx.x / kWarpSize; }
__device__ __forceinline__ unsigned lower_lanes() { return (1u << lane_in_warp()) - 1; }

__device__ __forceinline__ int32_t* words_of(const PlanArgs& args, int rank, int64_t place) {
  return reinterpret_cast<int32_t*>(static_cast<char*>(args.peers.memory[rank]) + place);
}
__device__ __forceinline__ uint32_t* flag_of(const PlanArgs& args, PlanWait what, int at, int from) {
  const int which = static_cast<int>(what) - static_cast<int>(PlanWait::kCounts);
  return reinterpret_cast<uint32_t*>(words_of(args, at, args.layout.flags[which])) + from;
}

// In the memory of this rank.
struct Counts {
  const int32_t* table;
  int64_t columns, experts;

  __device__ __forceinline__ int32_t of(int rank, int64_t column) const {
    return __ldcg(table + rank * columns + column);
  }
  __device__ __forceinline__ int32_t tokens(int from, int to) const { return of(from, experts + to); }
};

__device__ __forceinline__ Counts counts_of(const PlanArgs& args, int which) {
  return {words_of(args, args.peers.rank, args.layout.counts[which]), args.columns(), args.experts};
}

// Ends the plan and all later calls of the channel.
inline __device__ __noinline__ void fail_plan(const PlanArgs& args, int rank, PlanWait what) {
  if (atomicCAS(&args.state->failed, 0, static_cast<int32_t>(what)) != 0) return;
  args.state->failed_rank = rank;
  if (!args.failure) return;
  args.failure->rank = rank;
  args.failure->phase_id = args.marks.phase_id;
  __threadfence_system();
  args.failure->wait = static_cast<int32_t>(ExchangeWait::kPlan);
}

// Waits until all ranks have set their flag; called by all threads. False if one did not in time, or failed before.
__device__ __forceinline__ bool wait_for_ranks(const PlanArgs& args, PlanWait what, uint32_t epoch) {
  const int rank = threadIdx.x;
  bool is_late = false;
  if (rank < args.peers.ranks) {
    const uint32_t* const flag = flag_of(args, what, args.peers.rank, rank);
    const uint64_t begin = nanoseconds();
    // A flag is that of this plan or of an earlier one: a rank sets the next only after all have set kSlots of this one, which they
    // do after their last wait for the other two flags, and it sets the next kSlots after all have begun the next plan.
    while (load_acquire_system(flag) != epoch) {
      __nanosleep(64);
      const uint64_t waited = nanoseconds() - begin;
      if (waited >= distributed::kLongWait) distributed::publish_wait(args.marks, &args.state->is_published);
      is_late = waited > static_cast<uint64_t>(args.timeout_ns) ||
                *static_cast<volatile int32_t*>(&args.state->failed) != 0;
      if (!is_late) continue;
      fail_plan(args, rank, what);
      break;
    }
  }
  return !__syncthreads_or(is_late);
}

// Sets this rank's flag in the memory of all ranks, after what all threads of the block have put. Called by all threads.
__device__ __forceinline__ void announce(const PlanArgs& args, PlanWait what, uint32_t epoch) {
  __syncthreads();
  const int rank = threadIdx.x;
  if (rank < args.peers.ranks) store_release_system(flag_of(args, what, rank, args.peers.rank), epoch);
}

// Whether this is the last block of the kernel to come here; then what the others have written is visible, and with `puts` also
// comes before what this block announces to other ranks. Called by all threads.
__device__ __forceinline__ bool is_last_block(PlanState* state, Chunk& chunk, bool puts) {
  __syncthreads();
  if (gridDim.x == 1) return true;  // a block's barrier is enough for its own threads
  if (threadIdx.x == 0) {
    puts ? __threadfence_system() : __threadfence();  // for what all threads wrote before the barrier
    chunk.is_last = atomicAdd(&state->finished_blocks, 1u) == gridDim.x - 1;
    if (chunk.is_last)
      state->finished_blocks = 0;  // for the next kernel, which begins when this one has ended
    puts ? __threadfence_system() : __threadfence();
  }
  __syncthreads();
  return chunk.is_last != 0;
}

// False if an earlier plan or step has failed. `is_first`: of the plan. `load(chunk)` reads what the kernel needs of its chunk while the state is read. Called by
// all threads, before anything that earlier kernels write.
template <typename Load>
__device__ __forceinline__ bool begin_step(const PlanArgs& args, Chunk& chunk, bool is_first, Load load) {
  pdl_wait();
  pdl_launch_dependents();
  const volatile PlanState* const state = args.state;
  const uint32_t epoch = state->epoch + (is_first ? 1 : 0);
  const int32_t failed = state->failed;
  if (threadIdx.x == 0) {
    chunk.begin = blockIdx.x * args.chunk_tokens();
    const int64_t left = args.tokens - chunk.begin, most = args.chunk_tokens();
    chunk.tokens = static_cast<int>(left < most ? left : most);
  }
  __syncthreads();
  load(chunk);
  if (threadIdx.x == 0) chunk.epoch = epoch;
  return !__syncthreads_or(failed != 0);
}

template <typename Index>
__device__ __forceinline__ void load_experts(const PlanArgs& args, Chunk& chunk) {
  const int topk = static_cast<int>(args.topk);
  for (int i = threadIdx.x; i < chunk.tokens * topk; i += kPlanThreads) {
    const int64_t place = chunk.begin * topk + i;
    const auto index = static_cast<int64_t>(static_cast<const Index*>(args.indices)[place]);
    chunk.experts[i] = args.range.allows(index) ? static_cast<int32_t>(index) : kWrongExpert;
  }
}

// Sets the ranks of each token to those of its indices for which is_kept(i). Called by all threads.
template <typename IsKept>
__device__ __forceinline__ void find_ranks(const PlanArgs& args, Chunk& chunk, IsKept is_kept) {
  const int topk = static_cast<int>(args.topk), local = static_cast<int>(args.local_experts());
  for (int t = threadIdx.x; t < chunk.tokens; t += kPlanThreads) chunk.ranks[t] = RankMask{};
  __syncthreads();
  for (int i = threadIdx.x; i < chunk.tokens * topk; i += kPlanThreads) {
    if (chunk.experts[i] < 0 || !is_kept(i)) continue;
    const int rank = chunk.experts[i] / local;
    atomicOr(&chunk.ranks[i / topk].words[rank / 32], 1u << rank % 32);
  }
  __syncthreads();
}

// Calls visit(t, n) for the tokens of the chunk that go to a rank; n of them are before t. Returns their number. Called by a warp.
template <typename Visit>
__device__ __forceinline__ int visit_tokens(const Chunk& chunk, int rank, Visit visit) {
  int before = 0;
  for (int first = 0; first < chunk.tokens; first += kWarpSize) {
    const int t = first + lane_in_warp();
    const bool goes = t < chunk.tokens && chunk.ranks[t].has(rank);
    const unsigned lanes = __ballot_sync(kWholeWarp, goes);
    if (goes) visit(t, before + __popc(lanes & lower_lanes()));
    before += __popc(lanes);
  }
  return before;
}

// The tokens that each rank gets.
struct TokenCounts {
  int32_t own[kMostPeers];     // from this rank
  int32_t before[kMostPeers];  // from the ranks before this one
  int32_t all[kMostPeers];
  int32_t first_past[kMostPeers];  // drop_past_bound(): the first token of the chunk that is past the bound
};

// Called by all threads.
__device__ __forceinline__ void load_tokens(const PlanArgs& args, const Counts& counts, TokenCounts& tokens) {
  for (int to = warp_in_block(); to < args.peers.ranks; to += kPlanWarps) {
    uint32_t before = 0, all = 0;
    for (int from = lane_in_warp(); from < args.peers.ranks; from += kWarpSize) {
      const auto count = static_cast<uint32_t>(counts.tokens(from, to));
      all += count;
      before += from < args.peers.rank ? count : 0;
      if (from == args.peers.rank) tokens.own[to] = static_cast<int32_t>(count);
    }
    before = __reduce_add_sync(kWholeWarp, before);
    all = __reduce_add_sync(kWholeWarp, all);
    if (lane_in_warp() != 0) continue;
    tokens.before[to] = static_cast<int32_t>(before);
    tokens.all[to] = static_cast<int32_t>(all);
  }
  __syncthreads();
}

// Whether any rank gets more tokens than the bound. `tokens`: by the first counts. Called by all threads.
__device__ __forceinline__ bool is_past_bound(const PlanArgs& args, const TokenCounts& tokens) {
  if (args.bound < 0) return false;
  return __syncthreads_or(threadIdx.x < args.peers.ranks && tokens.all[threadIdx.x] > args.bound);
}

// Removes the experts of each rank from those tokens of the chunk that are past the bound there. Called by all threads.
__device__ __forceinline__ void drop_past_bound(const PlanArgs& args, Chunk& chunk, TokenCounts& tokens) {
  find_ranks(args, chunk, [](int) { return true; });
  const int topk = static_cast<int>(args.topk), local = static_cast<int>(args.local_experts());
  const int32_t* const before_chunk = args.chunk_counts[0] + blockIdx.x * args.chunk_stride() + args.experts;
  for (int rank = warp_in_block(); rank < args.peers.ranks; rank += kPlanWarps) {
    const int64_t left = args.bound - tokens.before[rank] - before_chunk[rank];
    int first = chunk.tokens;
    visit_tokens(chunk, rank, [&](int t, int n) {
      if (n >= left) first = min(first, t);
    });
    first = __reduce_min_sync(kWholeWarp, first);
    if (lane_in_warp() == 0) tokens.first_past[rank] = first;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < chunk.tokens * topk; i += kPlanThreads) {
    const int32_t expert = chunk.experts[i];
    if (expert >= 0 && i / topk >= tokens.first_past[expert / local]) chunk.experts[i] = kNoExpert;
  }
  __syncthreads();
}

// Shared memory of scan_experts().
struct ExpertScan {
  BlockScan<int64_t, kPlanThreads> scan;
  int64_t end[kMostPeers + 1];  // slots of the experts of all ranks before one

  __device__ __forceinline__ int64_t rows(int rank) const { return end[rank + 1] - end[rank]; }
};

// Calls visit(e, rank, start, end, before) for each expert: its slots with padding are start .. end - 1 at its rank, and `before` of
// them are those of ranks before this one. Called by all threads.
template <typename Visit>
__device__ __forceinline__ void scan_experts(const PlanArgs& args, const Counts& counts, ExpertScan& shared,
                                             Visit visit) {
  const int experts = static_cast<int>(args.experts), local = static_cast<int>(args.local_experts());
  if (threadIdx.x == 0) shared.end[0] = 0;
  int64_t earlier = 0;
  for (int first = 0; first < experts; first += kPlanThreads) {
    const int e = first + threadIdx.x, rank = e / local;
    int64_t count = 0, before = 0;
    if (e < experts) {
#pragma unroll 8
      for (int q = 0; q < args.peers.ranks; ++q) {
        const int32_t of_rank = counts.of(q, e);
        count += of_rank;
        before += q < args.peers.rank ? of_rank : 0;
      }
    }
    const int64_t padded = (count + args.alignment - 1) / args.alignment * args.alignment;
    int64_t total;
    const int64_t end = earlier + shared.scan.inclusive(padded, total);
    if (e < experts && e % local == local - 1) shared.end[rank + 1] = end;
    __syncthreads();
    if (e < experts) {
      const int64_t begin = shared.end[rank];
      visit(e, rank, end - padded - begin, end - begin, before);
    }
    earlier += total;
  }
  __syncthreads();
}

}  // namespace transformer_plugin::expert_parallel::one_sided
