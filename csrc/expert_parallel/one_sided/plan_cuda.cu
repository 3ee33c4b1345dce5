// The kernels of a plan by records (plan_args.h). Blocks of 256 threads; one block for each chunk of this rank's tokens.
//   count_kernel     counts the experts and the ranks of a chunk. The last block turns the counts of the chunks into those before
//                    each chunk, and puts the totals to all ranks. It also marks all slots and records as unused.
//   assign_kernel    waits for the counts of all ranks. One warp gives the indices of the chunk slots, in order. Then the rows of
//                    the chunk are numbered, and their slots are put to the ranks that get them.
//   number_kernel    the latter, where a capacity drops slots: after all chunks have their slots.
//   receive_kernel   waits for the slots from all ranks and copies them.
// Shared memory: one counter for each expert and rank, and the indices, slots and ranks of a chunk. Integer atomics do not
// change the result.
#include <algorithm>
#include <stdexcept>

#include "common/expert_index.cuh"
#include "common/launch.cuh"
#include "expert_parallel/one_sided/plan_args.h"
#include "expert_parallel/one_sided/system_memory.cuh"

namespace transformer_plugin::expert_parallel::one_sided {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMostPairs = 1024;  // indices of a chunk
constexpr int kMostTokens = 512;  // of a chunk
constexpr int kMaskWords = 3;     // of 32 ranks each
constexpr unsigned kAllLanes = 0xffffffffu;
static_assert(kMostPeers <= 32 * kMaskWords && kMostPeers < kThreads, "a thread and a bit for each rank");

// The ranks that a token goes to.
struct RankMask {
  uint32_t words[kMaskWords];

  __device__ __forceinline__ void add(int rank) {
#pragma unroll
    for (int w = 0; w < kMaskWords; ++w)
      if (rank / 32 == w) words[w] |= 1u << rank % 32;
  }
  __device__ __forceinline__ bool has(int rank) const { return words[rank / 32] >> rank % 32 & 1u; }
  __device__ __forceinline__ void remove(int rank) { words[rank / 32] &= ~(1u << rank % 32); }
  // How many of its ranks are less.
  __device__ __forceinline__ int before(int rank) const {
    int count = 0;
    for (int w = 0; w < rank / 32; ++w) count += __popc(words[w]);
    return count + __popc(words[rank / 32] & ((1u << rank % 32) - 1));
  }
};

struct Chunk {
  int32_t experts[kMostPairs];  // expert of each index, or -1
  int32_t slots[kMostPairs];
  RankMask ranks[kMostTokens];
  int32_t records[kMostPairs];       // [tokens, destinations]: the record to each rank of a token
  int8_t destinations[kMostPairs];   // that rank
  int32_t first_record[kMostPeers];  // of this rank's records to each rank
  int32_t first_place[kMostPeers];   // of this rank's slots in the memory of each rank
  int32_t is_over;
  uint32_t epoch;
  int64_t begin;  // the first token
  int tokens;
};

__device__ __forceinline__ int32_t* words_of(const PlanArgs& args, int rank, int64_t place) {
  return reinterpret_cast<int32_t*>(static_cast<char*>(args.peers.memory[rank]) + place);
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

// Waits until all ranks have set their flag; called by all threads. False if one did not in time, or failed before.
__device__ __forceinline__ bool wait_for_ranks(const PlanArgs& args, PlanWait what, uint32_t epoch) {
  const int rank = threadIdx.x;
  bool is_late = false;
  if (rank < args.peers.ranks) {
    const int which = static_cast<int>(what) - static_cast<int>(PlanWait::kCounts);
    const uint32_t* const flag =
        reinterpret_cast<const uint32_t*>(words_of(args, args.peers.rank, args.layout.flags[which])) + rank;
    const uint64_t begin = nanoseconds();
    // A flag is that of this plan or of an earlier one, because no rank begins another plan before this one has ended here.
    while (load_acquire_system(flag) != epoch) {
      __nanosleep(64);
      is_late = nanoseconds() - begin > static_cast<uint64_t>(args.timeout_ns) ||
                *static_cast<volatile int32_t*>(&args.state->failed) != 0;
      if (!is_late) continue;
      if (atomicCAS(&args.state->failed, 0, static_cast<int32_t>(what)) == 0) args.state->failed_rank = rank;
      break;
    }
  }
  return !__syncthreads_or(is_late);
}

// Sets this rank's flag in the memory of all ranks, after what all threads of the block have put. Called by all threads.
__device__ __forceinline__ void announce(const PlanArgs& args, PlanWait what, uint32_t epoch) {
  __syncthreads();
  const int rank = threadIdx.x;
  if (rank >= args.peers.ranks) return;
  const int which = static_cast<int>(what) - static_cast<int>(PlanWait::kCounts);
  store_release_system(
      reinterpret_cast<uint32_t*>(words_of(args, rank, args.layout.flags[which])) + args.peers.rank, epoch);
}

// Whether this is the last block of the kernel to come here; then what the others have written is visible. Called by all threads.
__device__ __forceinline__ bool is_last_block(PlanState* state, int32_t* shared) {
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    const bool last = atomicAdd(&state->finished_blocks, 1u) == gridDim.x - 1;
    if (last) state->finished_blocks = 0;
    *shared = last;
    __threadfence();
  }
  __syncthreads();
  return *shared != 0;
}

// False if an earlier plan has failed. Called by all threads.
__device__ __forceinline__ bool begin_plan(const PlanArgs& args, Chunk& chunk) {
  if (threadIdx.x == 0) {
    chunk.epoch = args.state->epoch + 1;
    chunk.is_over = 0;
    chunk.begin = blockIdx.x * args.chunk_tokens();
    const int64_t left = args.tokens - chunk.begin, most = args.chunk_tokens();
    chunk.tokens = static_cast<int>(left < most ? left : most);
  }
  return !__syncthreads_or(*static_cast<volatile int32_t*>(&args.state->failed) != 0);
}

template <typename Index>
__device__ __forceinline__ void load_experts(const PlanArgs& args, Chunk& chunk, bool reports) {
  const int topk = static_cast<int>(args.topk);
  for (int i = threadIdx.x; i < chunk.tokens * topk; i += kThreads) {
    const int64_t place = chunk.begin * topk + i;
    const auto index = static_cast<int64_t>(static_cast<const Index*>(args.indices)[place]);
    if (reports) report_wrong_expert(args.range, index, place);
    chunk.experts[i] = index >= 0 && index < args.experts ? static_cast<int32_t>(index) : -1;
  }
  __syncthreads();
}

// Sets the ranks of each token to those of its indices for which is_kept(i).
template <typename IsKept>
__device__ __forceinline__ void find_ranks(const PlanArgs& args, Chunk& chunk, IsKept is_kept) {
  const int topk = static_cast<int>(args.topk), local = static_cast<int>(args.local_experts());
  for (int t = threadIdx.x; t < chunk.tokens; t += kThreads) {
    RankMask mask{};
    for (int i = t * topk; i < (t + 1) * topk; ++i)
      if (chunk.experts[i] >= 0 && is_kept(i)) mask.add(chunk.experts[i] / local);
    chunk.ranks[t] = mask;
  }
  __syncthreads();
}

// Whether any rank gets more tokens than the bound, by the first counts. Called by all threads.
__device__ __forceinline__ bool is_past_bound(const PlanArgs& args) {
  if (args.bound < 0) return false;
  const Counts counts = counts_of(args, 0);
  int64_t tokens = 0;
  if (threadIdx.x < args.peers.ranks)
    for (int q = 0; q < args.peers.ranks; ++q) tokens += counts.tokens(q, threadIdx.x);
  return __syncthreads_or(tokens > args.bound);
}

// Removes the experts of each rank from those tokens of the chunk that are past the bound there.
__device__ __forceinline__ void drop_past_bound(const PlanArgs& args, Chunk& chunk) {
  find_ranks(args, chunk, [](int) { return true; });
  const int rank = threadIdx.x, topk = static_cast<int>(args.topk);
  if (rank < args.peers.ranks) {
    const Counts counts = counts_of(args, 0);
    int64_t left = args.bound - args.chunk_counts[0][blockIdx.x * args.columns() + args.experts + rank];
    for (int q = 0; q < args.peers.rank; ++q) left -= counts.tokens(q, rank);
    for (int t = 0; t < chunk.tokens; ++t) {
      if (!chunk.ranks[t].has(rank) || left-- > 0) continue;
      for (int i = t * topk; i < (t + 1) * topk; ++i)  // no other thread has this rank's experts
        if (chunk.experts[i] >= 0 && chunk.experts[i] / args.local_experts() == rank) chunk.experts[i] = -1;
    }
  }
  __syncthreads();
}

__device__ __forceinline__ void fill(int32_t* words, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step)
    words[i] = -1;
}

// `kept`: once more, without the tokens past the bound.
template <typename Index, bool kept>
__global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ PlanArgs args) {
  __shared__ Chunk chunk;
  int32_t* const counts = dynamic_words();
  const int columns = static_cast<int>(args.columns());
  if (!begin_plan(args, chunk)) return;
  if constexpr (kept) {
    if (!wait_for_ranks(args, PlanWait::kCounts, chunk.epoch) || !is_past_bound(args)) return;
  } else {
    fill(args.source, args.capacity);
    fill(args.records, 2 * args.max_tokens * args.destinations());
  }
  for (int i = threadIdx.x; i < columns; i += kThreads) counts[i] = 0;
  load_experts<Index>(args, chunk, !kept);
  if constexpr (kept) drop_past_bound(args, chunk);
  for (int i = threadIdx.x; i < chunk.tokens * static_cast<int>(args.topk); i += kThreads)
    if (chunk.experts[i] >= 0) atomicAdd(&counts[chunk.experts[i]], 1);
  find_ranks(args, chunk, [](int) { return true; });
  const int rank = threadIdx.x;
  if (rank < args.peers.ranks) {
    int sum = 0;
    for (int t = 0; t < chunk.tokens; ++t) sum += chunk.ranks[t].has(rank);
    counts[args.experts + rank] = sum;
  }
  __syncthreads();
  int32_t* const of_chunks = args.chunk_counts[kept];
  for (int i = threadIdx.x; i < columns; i += kThreads)
    __stcg(of_chunks + blockIdx.x * args.columns() + i, counts[i]);
  if (!is_last_block(args.state, &chunk.is_over)) return;
  for (int i = threadIdx.x; i < columns; i += kThreads) {
    int32_t before = 0;
#pragma unroll 8
    for (int c = 0; c < static_cast<int>(gridDim.x); ++c) {
      int32_t* const count = of_chunks + c * args.columns() + i;
      const int32_t own = __ldcg(count);
      __stcg(count, before);
      before += own;
    }
    for (int r = 0; r < args.peers.ranks; ++r)
      words_of(args, r, args.layout.counts[kept])[args.peers.rank * args.columns() + i] = before;
  }
  announce(args, kept ? PlanWait::kKeptCounts : PlanWait::kCounts, chunk.epoch);
}

__device__ __forceinline__ int64_t warp_prefix_sum(int64_t value) {
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int64_t left = __shfl_up_sync(kAllLanes, value, distance);
    if (static_cast<int>(threadIdx.x % kWarpSize) >= distance) value += left;
  }
  return value;
}

// The slots that a rank needs.
__device__ __forceinline__ int64_t required_rows(const PlanArgs& args, const Counts& counts, int rank) {
  int64_t rows = 0;
  for (int64_t e = rank * args.local_experts(); e < (rank + 1) * args.local_experts(); ++e) {
    int64_t total = 0;
    for (int q = 0; q < args.peers.ranks; ++q) total += counts.of(q, e);
    rows += (total + args.alignment - 1) / args.alignment * args.alignment;
  }
  return rows;
}

// Sets next[e] to the first slot of the chunk's indices of each expert; a slot past the capacity is the capacity or more. Sets
// rows[r] to the slots that rank r needs. The first block writes what the plan says about experts. Returns whether a rank needs
// more than the capacity.
__device__ __forceinline__ bool find_first_slots(const PlanArgs& args, const Counts& counts,
                                                 const int32_t* before_chunk, uint32_t* next, int64_t* rows) {
  const int local = static_cast<int>(args.local_experts()), lane = threadIdx.x % kWarpSize;
  const auto at_most = [&](int64_t slot) { return slot < args.capacity ? slot : args.capacity; };
  bool is_over = false;
  for (int r = threadIdx.x / kWarpSize; r < args.peers.ranks; r += kWarps) {
    int64_t end = 0;  // of the experts before these lanes
    for (int first = 0; first < local; first += kWarpSize) {
      const int e = r * local + first + lane;
      const bool is_expert = first + lane < local;
      int64_t total = 0, before = 0;
      for (int q = 0; is_expert && q < args.peers.ranks; ++q) {
        const int32_t count = counts.of(q, e);
        total += count;
        before += q < args.peers.rank ? count : 0;
      }
      const int64_t padded = (total + args.alignment - 1) / args.alignment * args.alignment;
      const int64_t sum = warp_prefix_sum(is_expert ? padded : 0), start = end + sum - padded;
      if (is_expert) {
        next[e] = static_cast<uint32_t>(at_most(start + before + before_chunk[e]));
        if (blockIdx.x == 0) args.first_slots[e] = static_cast<int32_t>(at_most(start));
        if (blockIdx.x == 0 && r == args.peers.rank)
          args.tokens_per_expert[first + lane] = at_most(end + sum) - at_most(start);
      }
      end += __shfl_sync(kAllLanes, sum, kWarpSize - 1);
    }
    is_over |= end > args.capacity;
    if (lane == 0) rows[r] = end;
  }
  const bool any = __syncthreads_or(is_over);
  if (blockIdx.x == 0 && threadIdx.x == 0) args.first_slots[args.experts] = any;
  return any;
}

// Gives the indices of the chunk slots, in order: by one warp, 32 at a time.
__device__ __forceinline__ void assign_slots(const PlanArgs& args, Chunk& chunk, uint32_t* next) {
  if (threadIdx.x < kWarpSize) {
    const int pairs = chunk.tokens * static_cast<int>(args.topk);
    const unsigned lower_lanes = (1u << threadIdx.x) - 1;
    for (int first = 0; first < pairs; first += kWarpSize) {
      const int i = first + threadIdx.x;
      const int expert = i < pairs ? chunk.experts[i] : -1;
      const unsigned same = __match_any_sync(kAllLanes, expert);
      const uint32_t begin = expert >= 0 ? next[expert] : 0;
      __syncwarp();
      if (expert >= 0 && (same & lower_lanes) == 0) next[expert] = begin + __popc(same);
      __syncwarp();
      const uint32_t slot = begin + __popc(same & lower_lanes);
      if (i < pairs)
        chunk.slots[i] =
            expert >= 0 && slot < static_cast<uint64_t>(args.capacity) ? static_cast<int32_t>(slot) : -1;
    }
  }
  __syncthreads();
}

// Numbers the rows of the chunk, from before_chunk[r] on for rank r, writes the records, and puts the slots. `place_of(r)` is
// where this rank's slots begin in the memory of rank r, and sent[r] the rows to it. Called by all threads.
template <typename PlaceOf, typename Sent>
__device__ __forceinline__ void put_slots(const PlanArgs& args, Chunk& chunk, const int32_t* before_chunk,
                                          PlaceOf place_of, Sent sent) {
  const int rank = threadIdx.x, ranks = args.peers.ranks, topk = static_cast<int>(args.topk);
  const int destinations = static_cast<int>(args.destinations());
  for (int i = threadIdx.x; i < chunk.tokens * destinations; i += kThreads) chunk.destinations[i] = -1;
  if (rank < ranks) {
    int32_t first = 0;
    for (int r = 0; r < rank; ++r) first += sent(r);
    chunk.first_record[rank] = first;
    chunk.first_place[rank] = place_of(rank);
  }
  __syncthreads();
  if (rank < ranks) {
    int32_t record = chunk.first_record[rank] + before_chunk[rank];
    for (int t = 0; t < chunk.tokens; ++t) {
      if (!chunk.ranks[t].has(rank)) continue;
      const int i = t * destinations + chunk.ranks[t].before(rank);
      chunk.records[i] = record++;
      chunk.destinations[i] = static_cast<int8_t>(rank);
    }
  }
  __syncthreads();
  int32_t* const tokens = args.records + args.max_tokens * destinations;
  for (int i = threadIdx.x; i < chunk.tokens * destinations; i += kThreads) {
    if (chunk.destinations[i] < 0) continue;
    args.records[chunk.begin * destinations + i] = chunk.records[i];
    tokens[chunk.records[i]] = static_cast<int32_t>(chunk.begin) + i / destinations;
  }
  const int local = static_cast<int>(args.local_experts());
  for (int i = threadIdx.x; i < chunk.tokens * destinations * topk; i += kThreads) {
    const int row = i / topk, k = i % topk, to = chunk.destinations[row];
    if (to < 0) continue;
    const int pair = row / destinations * topk + k;
    const bool is_there = chunk.slots[pair] >= 0 && chunk.experts[pair] / local == to;
    const int64_t place = chunk.first_place[to] + chunk.records[row] - chunk.first_record[to];
    words_of(args, to, args.layout.slots)[place * topk + k] = is_there ? chunk.slots[pair] : -1;
  }
}

// The last block: puts how many rows this rank sends to each rank, and says what the plan needs.
template <typename Sent>
__device__ __forceinline__ void finish_slots(const PlanArgs& args, Chunk& chunk, Sent sent) {
  if (!is_last_block(args.state, &chunk.is_over)) return;
  const int to = threadIdx.x, ranks = args.peers.ranks;
  if (to < ranks) {
    const int32_t rows = sent(to);
    for (int r = 0; r < ranks; ++r) words_of(args, r, args.layout.sent)[args.peers.rank * ranks + to] = rows;
  }
  announce(args, PlanWait::kSlots, chunk.epoch);
}

// By the first block: what the plan says about all ranks. `rows` [ranks]: the slots that each needs of these counts.
__device__ __forceinline__ void write_required(const PlanArgs& args, const int64_t* rows, bool drops_tokens,
                                               int64_t* required, int64_t* tokens) {
  const Counts counts = counts_of(args, 0);
  const int rank = threadIdx.x, ranks = args.peers.ranks;
  if (rank < ranks) {
    required[rank] = drops_tokens ? required_rows(args, counts, rank) : rows[rank];
    tokens[rank] = 0;
    for (int q = 0; q < ranks; ++q) tokens[rank] += counts.tokens(q, rank);
    args.required[rank] = required[rank];
    args.required_tokens[rank] = tokens[rank];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  int64_t most_rows = 0, most_tokens = 0;
  for (int r = 0; r < ranks; ++r) {
    most_rows = required[r] > most_rows ? required[r] : most_rows;
    most_tokens = tokens[r] > most_tokens ? tokens[r] : most_tokens;
  }
  const bool past_bound = args.bound >= 0 && most_tokens > args.bound,
             past_capacity = most_rows > args.capacity;
  *args.overflow = past_bound || past_capacity;
  if (!args.report || !(past_bound || past_capacity)) return;
  *static_cast<volatile int64_t*>(args.report) = past_bound ? -most_tokens : most_rows;
  __threadfence_system();
}

template <typename Index>
__global__ void __launch_bounds__(kThreads) assign_kernel(const __grid_constant__ PlanArgs args) {
  __shared__ Chunk chunk;
  __shared__ int64_t rows[kMostPeers], required[kMostPeers], required_tokens[kMostPeers];
  uint32_t* const next = reinterpret_cast<uint32_t*>(dynamic_words());
  if (!begin_plan(args, chunk)) return;
  load_experts<Index>(args, chunk, false);
  if (!wait_for_ranks(args, PlanWait::kCounts, chunk.epoch)) return;
  const bool drops_tokens = is_past_bound(args);
  if (drops_tokens) {
    drop_past_bound(args, chunk);
    if (!wait_for_ranks(args, PlanWait::kKeptCounts, chunk.epoch)) return;
  }
  const Counts counts = counts_of(args, drops_tokens);
  const int32_t* const before_chunk = args.chunk_counts[drops_tokens] + blockIdx.x * args.columns();
  const bool drops_slots = find_first_slots(args, counts, before_chunk, next, rows);
  assign_slots(args, chunk, next);
  find_ranks(args, chunk, [&](int i) { return chunk.slots[i] >= 0; });
  if (blockIdx.x == 0) write_required(args, rows, drops_tokens, required, required_tokens);
  const int me = args.peers.rank;
  if (!drops_slots) {
    const auto sent = [&](int r) { return counts.tokens(me, r); };
    const auto place_of = [&](int r) {
      int32_t place = 0;
      for (int q = 0; q < me; ++q) place += counts.tokens(q, r);
      return place;
    };
    put_slots(args, chunk, before_chunk + args.experts, place_of, sent);
    return finish_slots(args, chunk, sent);
  }
  for (int i = threadIdx.x; i < chunk.tokens * static_cast<int>(args.topk); i += kThreads)
    args.own_slots[chunk.begin * args.topk + i] = chunk.slots[i];
  if (threadIdx.x < args.peers.ranks) {
    int32_t rows = 0;
    for (int t = 0; t < chunk.tokens; ++t) rows += chunk.ranks[t].has(threadIdx.x);
    args.kept_rows[blockIdx.x * args.peers.ranks + threadIdx.x] = rows;
  }
}

// Where the slots of rank `source` begin in the memory of rank `to`, where the capacity drops some: after as many rows of each
// rank before it as that has tokens there, or slots, whichever are fewer.
__device__ __forceinline__ int32_t bounded_place(const PlanArgs& args, const Counts& counts, int source,
                                                 int to) {
  const int64_t first = to * args.local_experts(), end = first + args.local_experts();
  int64_t place = 0;
  for (int q = 0; q < source; ++q) {
    int64_t slots = 0;
    for (int64_t e = first; e < end; ++e) {
      int64_t begin = args.first_slots[e];
      for (int before = 0; before < q; ++before) begin += counts.of(before, e);
      const int64_t last = begin + counts.of(q, e);
      slots +=
          (last < args.capacity ? last : args.capacity) - (begin < args.capacity ? begin : args.capacity);
    }
    const int64_t tokens = counts.tokens(q, to);
    place += slots < tokens ? slots : tokens;
  }
  return static_cast<int32_t>(place);
}

// Whether the capacity drops slots, as assign_kernel found.
__device__ __forceinline__ bool drops_slots(const PlanArgs& args) {
  return args.capacity_may_overflow && args.first_slots[args.experts] != 0;
}

template <typename Index>
__global__ void __launch_bounds__(kThreads) number_kernel(const __grid_constant__ PlanArgs args) {
  __shared__ Chunk chunk;
  __shared__ int32_t before_chunk[kMostPeers], sent_rows[kMostPeers];
  if (!begin_plan(args, chunk)) return;
  const bool drops_tokens = is_past_bound(args);
  const Counts counts = counts_of(args, drops_tokens);
  if (!drops_slots(args)) return;
  load_experts<Index>(args, chunk, false);
  for (int i = threadIdx.x; i < chunk.tokens * static_cast<int>(args.topk); i += kThreads)
    chunk.slots[i] = args.own_slots[chunk.begin * args.topk + i];
  __syncthreads();
  find_ranks(args, chunk, [&](int i) { return chunk.slots[i] >= 0; });
  if (threadIdx.x < args.peers.ranks) {
    int32_t before = 0, all = 0;
    for (int c = 0; c < static_cast<int>(gridDim.x); ++c) {
      const int32_t rows = args.kept_rows[c * args.peers.ranks + threadIdx.x];
      before += c < static_cast<int>(blockIdx.x) ? rows : 0;
      all += rows;
    }
    before_chunk[threadIdx.x] = before;
    sent_rows[threadIdx.x] = all;
  }
  __syncthreads();
  const auto sent = [&](int r) { return sent_rows[r]; };
  put_slots(
      args, chunk, before_chunk, [&](int r) { return bounded_place(args, counts, args.peers.rank, r); },
      sent);
  finish_slots(args, chunk, sent);
}

__global__ void __launch_bounds__(kThreads) receive_kernel(const __grid_constant__ PlanArgs args) {
  __shared__ Chunk chunk;
  __shared__ int32_t first_row[kMostPeers + 1], first_place[kMostPeers];
  if (!begin_plan(args, chunk)) return;
  if (!wait_for_ranks(args, PlanWait::kSlots, chunk.epoch)) return;
  const int me = args.peers.rank, ranks = args.peers.ranks, topk = static_cast<int>(args.topk);
  const int32_t* const sent = words_of(args, me, args.layout.sent);
  const auto from_to = [&](int from, int to) { return __ldcg(sent + from * ranks + to); };
  const bool drops_tokens = is_past_bound(args);
  const Counts counts = counts_of(args, drops_tokens);
  const bool is_bounded = drops_slots(args);
  const int r = threadIdx.x;
  if (r <= ranks) {
    int32_t row = 0, record = 0, put = 0, returned = 0;
    for (int q = 0; q < r; ++q) row += from_to(q, me);
    for (int q = 0; q < r; ++q) record += from_to(me, q);
    for (int q = 0; q < me && r < ranks && r != me; ++q) {  // a rank's own rows do not travel
      put += q != r ? from_to(q, r) : 0;
      returned += q != r ? from_to(r, q) : 0;
    }
    first_row[r] = row;
    if (r < ranks) first_place[r] = is_bounded ? bounded_place(args, counts, r, me) : row;
    if (blockIdx.x == 0) {
      args.peer_rows[r] = row;
      args.peer_rows[ranks + 1 + r] = record;
      args.peer_rows[2 * (ranks + 1) + r] = put;
      args.peer_rows[3 * (ranks + 1) + r] = returned;
    }
  }
  __syncthreads();
  const int32_t* const slots = words_of(args, me, args.layout.slots);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads, end = args.received_rows * topk;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < end; i += step) {
    const auto row = static_cast<int32_t>(i / topk);
    int32_t slot = -1;
    if (row < first_row[ranks]) {
      int low = 0, high = ranks;  // first_row[low] <= row < first_row[high]
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (first_row[middle] <= row ? low : high) = middle;
      }
      const int64_t place = first_place[low] + row - first_row[low];
      slot = __ldcg(slots + place * topk + i % topk);
    }
    args.slot[i] = slot;
    if (slot >= 0 && slot < args.capacity) args.source[slot] = row;
  }
  if (is_last_block(args.state, &chunk.is_over) && threadIdx.x == 0) args.state->epoch = chunk.epoch;
}

template <typename Index>
void launch(const PlanArgs& args, PlanStep step, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(args.chunks());
  const size_t counters = static_cast<size_t>(args.columns()) * sizeof(int32_t);
  switch (step) {
    case PlanStep::kCount: count_kernel<Index, false><<<blocks, kThreads, counters, stream>>>(args); break;
    case PlanStep::kCountKept:
      if (args.bound >= 0) count_kernel<Index, true><<<blocks, kThreads, counters, stream>>>(args);
      break;
    case PlanStep::kAssign: assign_kernel<Index><<<blocks, kThreads, counters, stream>>>(args); break;
    case PlanStep::kNumber:
      if (args.capacity_may_overflow) number_kernel<Index><<<blocks, kThreads, 0, stream>>>(args);
      break;
    case PlanStep::kReceive: {
      constexpr int64_t kPerThread = 4, kMostBlocks = 256;
      const unsigned grid = grid_size(args.received_rows * args.topk, kThreads * kPerThread);
      receive_kernel<<<std::min<unsigned>(grid, kMostBlocks), kThreads, 0, stream>>>(args);
    }
  }
  check_launch("a kernel of the plan");
}

}  // namespace

void launch_plan(const PlanArgs& args, PlanStep step, void* stream) {
  if (args.experts > kMostExperts || args.peers.ranks > kMostPeers)
    throw std::invalid_argument("transformer_plugin: a one-sided plan has at most 8192 experts and 72 ranks");
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  args.indices_are_int64 ? launch<int64_t>(args, step, cuda_stream)
                         : launch<int32_t>(args, step, cuda_stream);
}

}  // namespace transformer_plugin::expert_parallel::one_sided
