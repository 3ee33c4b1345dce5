// What the kernels of dispatch and combine share: taking of work, waits, putting of rows, and the end of an exchange.
//
// Blocks of 512 threads, at most two for each SM. In a launch of all steps, the first half of the blocks puts and then helps
// to receive; the others receive from the beginning. Blocks that wait for other ranks therefore never keep this rank's own
// rows from being put: these are taken by blocks that start first. The first block announces the exchange, and compares what the
// other ranks have announced when it has put its rows.
#pragma once

#include "common/launch.cuh"
#include "distributed/progress.cuh"
#include "expert_parallel/one_sided/args.h"
#include "expert_parallel/one_sided/system_memory.cuh"
#include "expert_parallel/peer_rows.h"

namespace transformer_plugin::expert_parallel::one_sided {

inline constexpr int kThreads = 512;
inline constexpr int kWarps = kThreads / kWarpSize;
inline constexpr int kBlocksPerSm = 2;
inline constexpr unsigned kAllLanes = 0xffffffffu;
static_assert(kWarps == kMostChunkRows, "a warp has a row of the largest chunk");
static_assert(kMostPeers <= kThreads, "a thread has a rank");

// Shared memory of a block.
struct BlockMemory {
  int32_t peer_rows[4][kMostPeers + 1];
  int32_t has_credit[kMostPeers];  // whether this block has seen that it may put rows to a rank
  char* output[kMostPeers];        // then: that rank's output, if rows go there
  uint32_t output_rows[kMostPeers];
  uint32_t unit;
  uint64_t epoch;
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

// What a warp has of a chunk: one of the parts of a row.
struct RowPart {
  int row;    // of the chunk
  int part;   // of the row
  int parts;  // of each row

  __device__ __forceinline__ explicit RowPart(int chunk_rows)
      : row(warp_of_thread() * chunk_rows / kWarps),
        part(warp_of_thread() % (kWarps / chunk_rows)),
        parts(kWarps / chunk_rows) {}
  __device__ __forceinline__ RowPart(int part, int parts) : row(0), part(part), parts(parts) {}

  // The first word of this lane, where a warp has `at_once` words of each lane in flight, and the number of words to its next ones.
  __device__ __forceinline__ int begin(int at_once) const {
    return part * at_once * kWarpSize + lane_of_thread();
  }
  __device__ __forceinline__ int step(int at_once) const { return parts * at_once * kWarpSize; }
};

// The parts of a rank's memory that belong to one exchange.
struct Regions {
  const Exchange& exchange;
  uint64_t epoch;

  __device__ __forceinline__ char* memory(int rank) const {
    return static_cast<char*>(exchange.peers.memory[rank]);
  }
  __device__ __forceinline__ char* data(int rank) const {
    return memory(rank) + exchange.layout.data[epoch & 1];
  }
  __device__ __forceinline__ uint64_t* flag(int rank, int64_t begin, int source, int64_t chunk) const {
    return reinterpret_cast<uint64_t*>(memory(rank) + exchange.layout.flags[epoch & 1]) +
           flag_index(begin, source, chunk, exchange.chunk_rows);
  }
  // In the memory of `rank`: what rank `of` has announced.
  __device__ __forceinline__ Announcement* announcement(int rank, int of) const {
    return reinterpret_cast<Announcement*>(memory(rank) + exchange.layout.announcements[epoch & 1]) + of;
  }
  // In the memory of `rank`: the last exchange that rank `of` has consumed.
  __device__ __forceinline__ uint64_t* credit(int rank, int of) const {
    return reinterpret_cast<uint64_t*>(memory(rank) + exchange.layout.credits) + of;
  }
};

// Ends the exchange and all later ones of the channel. `other`: what that rank has announced, if the calls differ.
inline __device__ __noinline__ void fail_exchange(const Exchange& exchange, int rank, ExchangeWait what,
                                                  const Announcement* other, uint32_t record_bytes) {
  LocalState* const state = exchange.state;
  if (atomicCAS(&state->failed, 0, static_cast<int32_t>(what)) != 0) return;
  state->failed_rank = rank;
  ChannelFailure* const failure = exchange.failure;
  if (!failure) return;
  failure->rank = rank;
  failure->phase_id = exchange.marks.phase_id;
  failure->record_bytes = record_bytes;
  if (other) {
    failure->other_phase_id = other->phase_id;
    failure->other_record_bytes = other->record_bytes;
  }
  __threadfence_system();
  failure->wait = static_cast<int32_t>(what);
}

// Waits until `reached(*word)`. False if that took too long, here or in another block.
template <typename Reached>
__device__ __noinline__ bool wait_for(const Exchange& exchange, const uint64_t* word, int rank,
                                      ExchangeWait what, Reached reached) {
  if (reached(load_acquire_system(word))) return true;
  constexpr unsigned kLongestPause = 256;
  const uint64_t begin = nanoseconds();
  LocalState* const state = exchange.state;
  for (unsigned pause = 32;; pause = pause < kLongestPause ? 2 * pause : kLongestPause) {
    __nanosleep(pause);
    if (reached(load_acquire_system(word))) return true;
    if (*static_cast<volatile int32_t*>(&state->failed) != 0) return false;
    const uint64_t waited = nanoseconds() - begin;
    if (waited >= distributed::kLongWait) distributed::publish_wait(exchange.marks, &state->is_published);
    if (waited < static_cast<uint64_t>(exchange.timeout_ns)) continue;
    fail_exchange(exchange, rank, what, nullptr, 0);
    return false;
  }
}

// A flag is that of this exchange or older: a rank puts rows of a later one only after this rank has consumed this one.
__device__ __forceinline__ bool wait_for_rows(const Regions& regions, const uint64_t* flag, int rank,
                                              ExchangeWait what) {
  const uint64_t epoch = regions.epoch;
  return wait_for(regions.exchange, flag, rank, what, [epoch](uint64_t value) { return value == epoch; });
}

// Waits until `rank` has consumed the exchange before the last one, whose regions are used again.
__device__ __forceinline__ bool wait_for_credit(const Regions& regions, int rank, ExchangeWait what) {
  const uint64_t epoch = regions.epoch;
  const uint64_t* const credit = regions.credit(regions.exchange.peers.rank, rank);
  return wait_for(regions.exchange, credit, rank, what,
                  [epoch](uint64_t value) { return value + 2 >= epoch; });
}

// Waits for what `rank` announces of this exchange. Its slot is not written again before this rank has consumed the exchange. Null
// if that took too long.
__device__ __forceinline__ const Announcement* wait_for_announcement(const Regions& regions, int rank) {
  const Announcement* const slot = regions.announcement(regions.exchange.peers.rank, rank);
  const bool is_there = wait_for_rows(regions, &slot->epoch, rank, ExchangeWait::kAnnouncement);
  return is_there ? slot : nullptr;
}

// What the announcement of an exchange says of it.
struct ExchangeCall {
  uint32_t record_bytes;
  OutputPlace place;
  ExchangeWait credit;
};

// Announces this rank's exchange to all others, a thread for each. Called by all threads of one block.
__device__ __forceinline__ void announce_exchange(const Regions& regions, const ExchangeCall& call) {
  const Exchange& exchange = regions.exchange;
  const int rank = threadIdx.x, me = exchange.peers.rank;
  if (rank >= exchange.peers.ranks || rank == me || !wait_for_credit(regions, rank, call.credit)) return;
  Announcement* const slot = regions.announcement(rank, me);
  slot->phase_id = exchange.marks.phase_id;
  slot->record_bytes = call.record_bytes;
  slot->puts_into_outputs = exchange.allocations != nullptr;
  slot->allocation = call.place.allocation;
  slot->output_rows = call.place.rows;
  slot->offset = call.place.offset;
  store_release_system(&slot->epoch, regions.epoch);
}

__device__ __forceinline__ bool is_same_call(const Exchange& exchange, const Announcement& other,
                                             uint32_t record_bytes) {
  return other.phase_id == exchange.marks.phase_id && other.record_bytes == record_bytes;
}

// Compares what the other ranks have announced with this rank's call. Called by all threads of one block.
__device__ __forceinline__ void compare_calls(const Regions& regions, uint32_t record_bytes) {
  const Exchange& exchange = regions.exchange;
  const int rank = threadIdx.x;
  if (rank >= exchange.peers.ranks || rank == exchange.peers.rank) return;
  const Announcement* const other = wait_for_announcement(regions, rank);
  if (!other || is_same_call(exchange, *other, record_bytes)) return;
  fail_exchange(exchange, rank, ExchangeWait::kDifferentCall, other, record_bytes);
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

// The next unit of work of a warp, as its first lane gets it.
__device__ __forceinline__ uint32_t take_unit(uint32_t* ticket) {
  return lane_of_thread() == 0 ? atomicAdd(ticket, 1u) : 0;
}

__device__ __forceinline__ uint32_t chunks_of(const Exchange& exchange, int64_t rows) {
  return static_cast<uint32_t>((rows + exchange.chunk_rows - 1) / exchange.chunk_rows);
}

// The most chunks of a rank other than this one; `begin` [ranks + 1].
__device__ __forceinline__ uint32_t most_chunks(const Exchange& exchange, const int32_t* begin) {
  const PeerPointers& peers = exchange.peers;
  uint32_t most = 0;
  for (int r = lane_of_thread(); r < peers.ranks; r += kWarpSize) {
    const uint32_t chunks = chunks_of(exchange, begin[r + 1] - begin[r]);
    if (r != peers.rank && chunks > most) most = chunks;
  }
  return __reduce_max_sync(kAllLanes, most);
}

template <typename Word>
__device__ __forceinline__ void copy_words(const void* from, void* to, int count, RowPart part) {
  constexpr int kAtOnce = 4;
  for (int i = part.begin(kAtOnce); i < count; i += part.step(kAtOnce)) {
    Word words[kAtOnce] = {};  // a word that is not loaded would keep the one before in a register
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

// Copies a part of a row. Called by a warp. Not inlined, so that its loop has all registers of a thread.
inline __device__ __noinline__ void copy_row(const void* from, void* to, int64_t bytes, RowPart part) {
  visit_words(reinterpret_cast<uint64_t>(from), reinterpret_cast<uint64_t>(to), bytes, [&](auto word) {
    const int count = static_cast<int>(bytes / static_cast<int64_t>(sizeof(word)));
    copy_words<decltype(word)>(from, to, count, part);
  });
}

// Stores zeros in a part of a row. Called by a warp.
__device__ __forceinline__ void clear_row(void* to, int64_t bytes, RowPart part) {
  visit_words(0, reinterpret_cast<uint64_t>(to), bytes, [&](auto word) {
    using Word = decltype(word);
    const int count = static_cast<int>(bytes / static_cast<int64_t>(sizeof(Word)));
    for (int i = part.begin(1); i < count; i += part.step(1)) static_cast<Word*>(to)[i] = Word{};
  });
}

// Reads the plan and the state into shared memory. False if an earlier exchange failed.
__device__ __forceinline__ bool begin_exchange(const Exchange& exchange, BlockMemory& block) {
  const int ends = exchange.peers.ranks + 1;
  for (int i = threadIdx.x; i < 4 * ends; i += kThreads)
    block.peer_rows[i / ends][i % ends] = exchange.peer_rows[i];
  for (int r = threadIdx.x; r < kMostPeers; r += kThreads) {
    block.has_credit[r] = 0;
    block.output[r] = nullptr;
  }
  if (threadIdx.x == 0) {
    block.epoch = exchange.state->epoch + 1;
    block.is_over = *static_cast<volatile int32_t*>(&exchange.state->failed);
  }
  __syncthreads();
  return block.is_over == 0;
}

// Waits until rows may be put to `rank`, and finds the output there if they go into it. Called by one thread.
__device__ __forceinline__ bool wait_for_destination(const Regions& regions, BlockMemory& block, int rank,
                                                     const ExchangeCall& call) {
  const Exchange& exchange = regions.exchange;
  if (!wait_for_credit(regions, rank, call.credit)) return false;
  if (exchange.allocations) {
    const Announcement* const there = wait_for_announcement(regions, rank);
    if (!there) return false;
    const bool is_known = there->allocation - 1 < kMostAllocations;  // none is 0
    if (there->puts_into_outputs && is_known && is_same_call(exchange, *there, call.record_bytes)) {
      void* const memory = exchange.allocations[(there->allocation - 1) * exchange.peers.ranks + rank];
      if (memory) block.output[rank] = static_cast<char*>(memory) + there->offset;
      block.output_rows[rank] = there->output_rows;
    }
  }
  return true;
}

// Puts this rank's rows from[r] .. from[r + 1] - 1 to the places at to[r] of each other rank r. Destinations take turns,
// beginning with the next rank, so that not all ranks store to one at a time. `put_row(j, rank, place, part)` is called by a warp.
// False if a wait took too long.
template <typename PutRow>
__device__ __forceinline__ bool put_rows(const Regions& regions, BlockMemory& block, PeerRows from_row,
                                         PeerRows to_row, const ExchangeCall& call, PutRow put_row) {
  const PeerPointers& peers = regions.exchange.peers;
  const int32_t *const from = block[from_row], *const to = block[to_row];
  const uint32_t others = peers.ranks - 1;
  const uint32_t units = others * most_chunks(regions.exchange, from);
  const RowPart part(regions.exchange.chunk_rows);
  return for_units(&regions.exchange.state->put_ticket, block, units, [&](uint32_t unit) {
    const int rank = static_cast<int>((peers.rank + 1 + unit % others) % peers.ranks);
    const int64_t chunk = unit / others;
    const int64_t first = chunk * regions.exchange.chunk_rows, rows = from[rank + 1] - from[rank];
    if (first >= rows) return true;
    if (!block.has_credit[rank]) {
      const bool is_late = threadIdx.x == 0 && !wait_for_destination(regions, block, rank, call);
      if (__syncthreads_or(is_late)) return false;
      if (threadIdx.x == 0) block.has_credit[rank] = 1;  // all threads have read it
    }
    const int64_t place = first + part.row;
    if (place < rows) put_row(from[rank] + place, rank, to[rank] + place, part);
    // The barrier and the release, which is a fence of the system, make the rows of all threads visible with the flag.
    __syncthreads();
    if (threadIdx.x == 0)
      store_release_system(regions.flag(rank, to[rank], peers.rank, chunk), regions.epoch);
    return true;
  });
}

// The last block to come here ends the kernel: it zeroes the tickets. Where this was the last step and no wait was in vain, it also
// sets the credit of this exchange on all ranks.
__device__ __forceinline__ void end_exchange(const Exchange& exchange, BlockMemory& block, int steps) {
  LocalState* const state = exchange.state;
  const PeerPointers& peers = exchange.peers;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    block.unit = atomicAdd(&state->finished_blocks, 1u);
    __threadfence();
    block.is_over = *static_cast<volatile int32_t*>(&state->failed);
  }
  __syncthreads();
  if (block.unit != gridDim.x - 1) return;
  const bool is_received = (steps & kReceive) && block.is_over == 0;
  if (threadIdx.x == 0) {
    state->put_ticket = 0;
    state->receive_ticket = 0;
    state->finished_blocks = 0;
    if (is_received) state->epoch = block.epoch;
    if (steps & kReceive) distributed::count_end(exchange.marks, &state->is_published);
  }
  const int r = threadIdx.x;
  const Regions regions{exchange, block.epoch};
  if (is_received && r < peers.ranks && r != peers.rank)
    store_release_system(regions.credit(r, peers.rank), regions.epoch);
}

// Runs the steps of an exchange that this block has part in.
template <typename Put, typename Receive>
__device__ __forceinline__ void run_steps(const Exchange& exchange, BlockMemory& block, int steps,
                                          const ExchangeCall& call, Put put, Receive receive) {
  if (blockIdx.x == 0 && threadIdx.x == 0 && (steps & kAnnounce)) distributed::count_begin(exchange.marks);
  if (begin_exchange(exchange, block)) {
    const Regions regions{exchange, block.epoch};
    const bool is_first = blockIdx.x == 0;
    if (is_first && (steps & kAnnounce)) announce_exchange(regions, call);
    const bool puts = (steps & kPut) && (steps != kWhole || blockIdx.x < (gridDim.x + 1) / 2);
    const bool goes_on = !puts || put(regions);
    if (goes_on && is_first && (steps & kReceive)) compare_calls(regions, call.record_bytes);
    if (goes_on && (steps & kReceive)) receive(regions);
  }
  end_exchange(exchange, block, steps);
}

}  // namespace transformer_plugin::expert_parallel::one_sided
