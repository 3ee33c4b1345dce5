// What the kernels of dispatch and combine share: taking of work, waits, putting of rows, and the end of an exchange.
//
// Blocks of 512 threads, at most two for each SM. In a launch of both halves, the first half of the blocks puts and then helps
// to receive; the others receive from the beginning. Blocks that wait for other ranks therefore never keep this rank's own
// rows from being put: these are taken by blocks that start first.
#pragma once

#include "common/launch.cuh"
#include "expert_parallel/one_sided/args.h"
#include "expert_parallel/one_sided/system_memory.cuh"
#include "expert_parallel/peer_rows.h"

namespace transformer_plugin::expert_parallel::one_sided {

inline constexpr int kThreads = 512;
inline constexpr int kWarps = kThreads / kWarpSize;
inline constexpr int kBlocksPerSm = 2;
inline constexpr unsigned kAllLanes = 0xffffffffu;
static_assert(kWarps == kChunkRows, "a warp has a row of a chunk");
static_assert(kMostPeers <= kThreads, "a thread has a rank");

// Shared memory of a block.
struct BlockMemory {
  int32_t peer_rows[4][kMostPeers + 1];
  int32_t has_credit[kMostPeers];  // whether this block has seen that it may put rows to a rank
  uint32_t unit;
  uint32_t epoch;
  int32_t is_over;

  __device__ __forceinline__ const int32_t* operator[](PeerRows row) const {
    return peer_rows[static_cast<int>(row)];
  }
  // Where the rows [r] of kReceived, or records of kSent, that are those of rank r begin in the region of rank `own`, which has
  // no place for its own.
  __device__ __forceinline__ int64_t place(PeerRows row, int rank, int own) const {
    const int32_t* const begin = (*this)[row];
    return rank > own ? begin[rank] - (begin[own + 1] - begin[own]) : begin[rank];
  }
};

__device__ __forceinline__ int lane_of_thread() { return threadIdx.x % kWarpSize; }
__device__ __forceinline__ int warp_of_thread() { return threadIdx.x / kWarpSize; }

// The parts of a rank's memory that belong to one exchange.
struct Regions {
  const Exchange& exchange;
  uint32_t epoch;

  __device__ __forceinline__ char* memory(int rank) const {
    return static_cast<char*>(exchange.peers.memory[rank]);
  }
  __device__ __forceinline__ char* data(int rank) const {
    return memory(rank) + exchange.layout.data[epoch & 1];
  }
  __device__ __forceinline__ uint32_t* flag(int rank, int64_t begin, int source, int64_t chunk) const {
    return reinterpret_cast<uint32_t*>(memory(rank) + exchange.layout.flags[epoch & 1]) +
           flag_index(begin, source, chunk);
  }
  // In the memory of `rank`: the last exchange that rank `of` has consumed.
  __device__ __forceinline__ uint32_t* credit(int rank, int of) const {
    return reinterpret_cast<uint32_t*>(memory(rank) + exchange.layout.credits) + of;
  }
};

// Waits until `reached(*word)`. False if that took too long, here or in another block.
template <typename Reached>
__device__ __noinline__ bool wait_for(const Exchange& exchange, const uint32_t* word, int rank,
                                      ExchangeWait what, Reached reached) {
  if (reached(load_acquire_system(word))) return true;
  constexpr unsigned kLongestPause = 256;
  const uint64_t begin = nanoseconds();
  LocalState* const state = exchange.state;
  for (unsigned pause = 32;; pause = pause < kLongestPause ? 2 * pause : kLongestPause) {
    __nanosleep(pause);
    if (reached(load_acquire_system(word))) return true;
    if (*static_cast<volatile int32_t*>(&state->failed) != 0) return false;
    if (nanoseconds() - begin < static_cast<uint64_t>(exchange.timeout_ns)) continue;
    if (atomicCAS(&state->failed, 0, static_cast<int32_t>(what)) == 0) state->failed_rank = rank;
    return false;
  }
}

// A flag is that of this exchange or older: a rank puts rows of a later one only after this rank has consumed this one. A test
// of equality is right also where the epoch of a flag that nobody wrote for long seems to be ahead.
__device__ __forceinline__ bool wait_for_rows(const Regions& regions, const uint32_t* flag, int rank,
                                              ExchangeWait what) {
  const uint32_t epoch = regions.epoch;
  return wait_for(regions.exchange, flag, rank, what, [epoch](uint32_t value) { return value == epoch; });
}

// Waits until `rank` has consumed the exchange before the last one, whose regions are used again. The difference is right
// where the epoch wraps.
__device__ __forceinline__ bool wait_for_credit(const Regions& regions, int rank, ExchangeWait what) {
  const uint32_t consumed = regions.epoch - 2;
  const uint32_t* const credit = regions.credit(regions.exchange.peers.rank, rank);
  return wait_for(regions.exchange, credit, rank, what,
                  [consumed](uint32_t value) { return static_cast<int32_t>(value - consumed) >= 0; });
}

// Hands units of work 0 .. count - 1 to the blocks, in ascending order, by the counter `ticket`. `work(unit)`, called by all
// threads of a block, returns false in all of them to end this; then for_units does too.
template <typename Work>
__device__ __forceinline__ bool for_units(uint32_t* ticket, BlockMemory& block, uint32_t count, Work work) {
  __syncthreads();  // all have read the unit of an earlier loop
  if (threadIdx.x == 0) block.unit = atomicAdd(ticket, 1u);
  __syncthreads();
  for (uint32_t unit = block.unit; unit < count; unit = block.unit) {
    uint32_t next = 0;
    if (threadIdx.x == 0) next = atomicAdd(ticket, 1u);  // comes while the block works
    if (!work(unit)) return false;
    __syncthreads();
    if (threadIdx.x == 0) block.unit = next;
    __syncthreads();
  }
  return true;
}

__device__ __forceinline__ int64_t chunks_of(int64_t rows) { return (rows + kChunkRows - 1) / kChunkRows; }

// The most chunks of a rank other than this one; `begin` [ranks + 1].
__device__ __forceinline__ uint32_t most_chunks(const int32_t* begin, const PeerPointers& peers) {
  uint32_t most = 0;
  for (int r = lane_of_thread(); r < peers.ranks; r += kWarpSize) {
    const uint32_t chunks = static_cast<uint32_t>(chunks_of(begin[r + 1] - begin[r]));
    if (r != peers.rank && chunks > most) most = chunks;
  }
  return __reduce_max_sync(kAllLanes, most);
}

template <typename Word>
__device__ __forceinline__ void copy_words(const void* from, void* to, int count) {
  constexpr int kAtOnce = 4;
  for (int i = lane_of_thread(); i < count; i += kAtOnce * kWarpSize) {
    Word words[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (i + u * kWarpSize < count) words[u] = static_cast<const Word*>(from)[i + u * kWarpSize];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (i + u * kWarpSize < count) static_cast<Word*>(to)[i + u * kWarpSize] = words[u];
  }
}

// Calls fn with a value of the largest type of words in which all of these can be read and written.
template <typename Fn>
__device__ __forceinline__ void visit_words(uint64_t from, uint64_t to, int64_t bytes, Fn fn) {
  const uint64_t all = from | to | static_cast<uint64_t>(bytes);
  if (all % sizeof(uint4) == 0) return fn(uint4{});
  if (all % sizeof(uint32_t) == 0) return fn(uint32_t{});
  fn(uint8_t{});
}

// Copies a row. Called by a warp. Not inlined, so that its loop has all registers of a thread.
inline __device__ __noinline__ void copy_row(const void* from, void* to, int64_t bytes) {
  visit_words(reinterpret_cast<uint64_t>(from), reinterpret_cast<uint64_t>(to), bytes, [&](auto word) {
    copy_words<decltype(word)>(from, to, static_cast<int>(bytes / static_cast<int64_t>(sizeof(word))));
  });
}

// Stores zeros in a row. Called by a warp.
__device__ __forceinline__ void clear_row(void* to, int64_t bytes) {
  visit_words(0, reinterpret_cast<uint64_t>(to), bytes, [&](auto word) {
    using Word = decltype(word);
    const int64_t count = bytes / static_cast<int64_t>(sizeof(Word));
    for (int64_t i = lane_of_thread(); i < count; i += kWarpSize) static_cast<Word*>(to)[i] = Word{};
  });
}

// Reads the plan and the state into shared memory. False if an earlier exchange failed.
__device__ __forceinline__ bool begin_exchange(const Exchange& exchange, BlockMemory& block) {
  const int ends = exchange.peers.ranks + 1;
  for (int i = threadIdx.x; i < 4 * ends; i += kThreads)
    block.peer_rows[i / ends][i % ends] = exchange.peer_rows[i];
  for (int r = threadIdx.x; r < kMostPeers; r += kThreads) block.has_credit[r] = 0;
  if (threadIdx.x == 0) {
    block.epoch = exchange.state->epoch + 1;
    block.is_over = *static_cast<volatile int32_t*>(&exchange.state->failed);
  }
  __syncthreads();
  return block.is_over == 0;
}

// Puts this rank's rows from[r] .. from[r + 1] - 1 to the places at to[r] of each other rank r. Destinations take turns,
// beginning with the next rank, so that not all ranks store to one at a time. `put_row(j, record)` is called by a warp. False
// if a wait took too long.
template <typename PutRow>
__device__ __forceinline__ bool put_rows(const Regions& regions, BlockMemory& block, PeerRows from_row,
                                         PeerRows to_row, int64_t stride, ExchangeWait what, PutRow put_row) {
  const PeerPointers& peers = regions.exchange.peers;
  const int32_t *const from = block[from_row], *const to = block[to_row];
  const uint32_t others = peers.ranks - 1;
  const uint32_t units = others * most_chunks(from, peers);
  return for_units(&regions.exchange.state->put_ticket, block, units, [&](uint32_t unit) {
    const int rank = static_cast<int>((peers.rank + 1 + unit % others) % peers.ranks);
    const int64_t chunk = unit / others;
    const int64_t place = chunk * kChunkRows + warp_of_thread(), rows = from[rank + 1] - from[rank];
    if (chunk * kChunkRows >= rows) return true;
    if (!block.has_credit[rank]) {
      const bool is_late = threadIdx.x == 0 && !wait_for_credit(regions, rank, what);
      if (__syncthreads_or(is_late)) return false;
      if (threadIdx.x == 0) block.has_credit[rank] = 1;
    }
    if (place < rows) put_row(from[rank] + place, regions.data(rank) + (to[rank] + place) * stride);
    // The barrier and the release, which is a fence of the system, make the rows of all threads visible with the flag.
    __syncthreads();
    if (threadIdx.x == 0)
      store_release_system(regions.flag(rank, to[rank], peers.rank, chunk), regions.epoch);
    return true;
  });
}

// The last block to come here ends the kernel: it zeroes the tickets and, where this was the receiving half, sets the
// credit of this exchange on all ranks.
__device__ __forceinline__ void end_exchange(const Regions& regions, BlockMemory& block, bool is_received) {
  LocalState* const state = regions.exchange.state;
  const PeerPointers& peers = regions.exchange.peers;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    block.unit = atomicAdd(&state->finished_blocks, 1u);
    __threadfence();
  }
  __syncthreads();
  if (block.unit != gridDim.x - 1) return;
  if (threadIdx.x == 0) {
    state->put_ticket = 0;
    state->receive_ticket = 0;
    state->finished_blocks = 0;
    if (is_received) state->epoch = regions.epoch;
  }
  if (!is_received) return;
  const int r = threadIdx.x;
  if (r < peers.ranks && r != peers.rank) store_release_system(regions.credit(r, peers.rank), regions.epoch);
}

// Runs the halves that `mode` asks of this block.
template <typename Put, typename Receive>
__device__ __forceinline__ void run_halves(const Exchange& exchange, BlockMemory& block, int mode, Put put,
                                           Receive receive) {
  if (!begin_exchange(exchange, block)) return;
  const Regions regions{exchange, block.epoch};
  const bool puts = mode == kPut || (mode == kBoth && blockIdx.x < (gridDim.x + 1) / 2);
  if (puts && !put(regions)) return;
  if ((mode & kReceive) && !receive(regions)) return;
  end_exchange(regions, block, mode & kReceive);
}

}  // namespace transformer_plugin::expert_parallel::one_sided
