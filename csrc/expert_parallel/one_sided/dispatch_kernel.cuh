// dispatch: token rows go to the ranks of their experts (DispatchArgs).
//
// Units of work are chunks of rows; a warp copies a row or a part of one, four 16-byte words a lane at a time. A block that receives zeroes
// the rows without a token and copies this rank's own rows first, because these do not wait for anyone. Rows that other ranks have put
// into the output are already in their first slot there; they are copied to the others.
#pragma once

#include "expert_parallel/one_sided/exchange.cuh"

namespace transformer_plugin::expert_parallel::one_sided {

// Copies a row to each of its slots but `except`. Called by a warp.
template <typename Word>
__device__ __forceinline__ void copy_words_to_slots(const void* from, char* output, int count,
                                                    const OutputSlots& slots, int64_t j, int32_t except,
                                                    RowPart part) {
  constexpr int kAtOnce = 4;
  const int32_t* const slot = slots.slot + j * slots.topk;
  for (int i = part.begin(kAtOnce); i < count; i += part.step(kAtOnce)) {
    Word words[kAtOnce] = {};  // a word that is not loaded would keep the one before in a register
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u)
      if (i + u * kWarpSize < count) words[u] = static_cast<const Word*>(from)[i + u * kWarpSize];
    for (int k = 0; k < slots.topk; ++k) {
      const int32_t s = slot[k];
      if (s < 0 || s >= slots.capacity || s == except) continue;
      Word* const to = reinterpret_cast<Word*>(output) + s * int64_t{count};
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u)
        if (i + u * kWarpSize < count) to[i + u * kWarpSize] = words[u];
    }
  }
}

inline __device__ __noinline__ void copy_row_to_slots(const void* from, char* output, int64_t bytes,
                                                      const OutputSlots& slots, int64_t j, int32_t except,
                                                      RowPart part) {
  visit_words(reinterpret_cast<uint64_t>(from), reinterpret_cast<uint64_t>(output), bytes, [&](auto word) {
    const int count = static_cast<int>(bytes / static_cast<int64_t>(sizeof(word)));
    copy_words_to_slots<decltype(word)>(from, output, count, slots, j, except, part);
  });
}

// The rows of this rank's records.
struct DispatchSource {
  const DispatchArgs& args;

  __device__ __forceinline__ int32_t of_record(int row, int64_t n) const {
    const Exchange& exchange = args.exchange;
    return exchange.records[row * exchange.max_tokens * exchange.destinations + n];
  }
  // Null: the token is past the input, and its row is zeros.
  __device__ __forceinline__ const char* row(const DispatchedRows& rows, int64_t n) const {
    const int64_t token = of_record(1, n);
    return token < args.tokens ? static_cast<const char*>(rows.input) + token * rows.row_bytes : nullptr;
  }
  __device__ __forceinline__ void copy(const DispatchedRows& rows, int64_t n, char* to, RowPart part) const {
    if (rows.row_bytes == 0) return;
    const char* const from = row(rows, n);
    from ? copy_row(from, to, rows.row_bytes, part) : clear_row(to, rows.row_bytes, part);
  }
};

struct Dispatch {
  const DispatchArgs& args;
  BlockMemory& block;

  __device__ __forceinline__ int64_t weights_offset() const { return record_stride(args.rows.row_bytes, 0); }
  __device__ __forceinline__ int64_t stride() const {
    return record_stride(args.rows.row_bytes, args.weights.row_bytes);
  }
  __device__ __forceinline__ char* row(int64_t j) const {
    return static_cast<char*>(args.rows.output) + j * args.rows.row_bytes;
  }
  __device__ __forceinline__ char* weights(int64_t j) const {
    return static_cast<char*>(args.weights.output) + j * args.weights.row_bytes;
  }

  // Puts the row of record `n` to the output of `rank`, if that is known, or to `place` of its region. Called by a warp.
  __device__ __forceinline__ void put_row(const Regions& regions, int64_t n, int rank, int64_t place,
                                          RowPart part) const {
    const DispatchSource source{args};
    char* const record = regions.data(rank) + place * stride();
    source.copy(args.weights, n, record + weights_offset(), part);
    if (!block.output[rank]) return source.copy(args.rows, n, record, part);
    const int64_t slot = source.of_record(2, n);
    if (slot < 0 || slot >= block.output_rows[rank]) return;
    source.copy(args.rows, n, block.output[rank] + slot * args.rows.row_bytes, part);
  }

  // Stores received row `j` from `from`; null: zeros.
  __device__ __forceinline__ void store_row(const char* from, int64_t j, RowPart part) const {
    const int64_t bytes = args.rows.row_bytes;
    if (!args.slots.slot) return from ? copy_row(from, row(j), bytes, part) : clear_row(row(j), bytes, part);
    if (from) return copy_row_to_slots(from, row(0), bytes, args.slots, j, -1, part);
    for (int k = 0; k < args.slots.topk; ++k) {
      const int32_t s = args.slots.slot[j * args.slots.topk + k];
      if (s >= 0 && s < args.slots.capacity) clear_row(row(s), bytes, part);
    }
  }

  // The rest of the slots of a row that another rank has put into the first one.
  __device__ __forceinline__ void copy_from_first_slot(int64_t j, RowPart part) const {
    int32_t first = -1;
    for (int k = 0; k < args.slots.topk && first < 0; ++k) {
      const int32_t s = args.slots.slot[j * args.slots.topk + k];
      if (s >= 0 && s < args.slots.capacity) first = s;
    }
    if (first >= 0) copy_row_to_slots(row(first), row(0), args.rows.row_bytes, args.slots, j, first, part);
  }

  __device__ __forceinline__ void copy_own_row(int64_t n, int64_t j, RowPart part) const {
    const DispatchSource source{args};
    store_row(source.row(args.rows, n), j, part);
    source.copy(args.weights, n, weights(j), part);
  }

  // A row that no token has: of the output, and of the received weights.
  __device__ __forceinline__ void clear_unused(int64_t j, int64_t last, RowPart part) const {
    if (args.slots.slot) {
      if (j < args.slots.capacity && args.slots.source[j] < 0) clear_row(row(j), args.rows.row_bytes, part);
    } else if (last + j < args.received_rows) {
      clear_row(row(last + j), args.rows.row_bytes, part);
    }
    if (args.weights.row_bytes != 0 && last + j < args.received_rows)
      clear_row(weights(last + j), args.weights.row_bytes, part);
  }

  // Whether the rows of `source` come into the output. Called by one thread.
  __device__ __forceinline__ bool wait_for_place(const Regions& regions, int source,
                                                 bool* into_output) const {
    *into_output = false;
    if (args.place.allocation == 0 || !args.exchange.allocations) return true;
    const Announcement* const there = wait_for_announcement(regions, source);
    if (!there) return false;
    *into_output = there->puts_into_outputs != 0;
    return true;
  }

  // Called by all threads of a block.
  __device__ __forceinline__ bool receive_chunk(const Regions& regions, int source, int64_t chunk,
                                                RowPart part) const {
    __shared__ bool into_output;
    const int32_t* const received = block[PeerRows::kReceived];
    const int64_t begin = received[source], first = begin + chunk * args.exchange.chunk_rows;
    const int rank = args.exchange.peers.rank;
    if (first >= received[source + 1]) return true;
    const int64_t place = block.place(PeerRows::kReceived, source, rank);
    bool is_late = false;
    if (threadIdx.x == 0) {
      is_late = !wait_for_place(regions, source, &into_output) ||
                !wait_for_rows(regions, regions.flag(rank, place, source, chunk), source,
                               ExchangeWait::kDispatchRows);
    }
    if (__syncthreads_or(is_late)) return false;
    const int64_t j = first + part.row;
    if (j >= received[source + 1]) return true;
    const char* const record = regions.data(rank) + (place + j - begin) * stride();
    into_output ? copy_from_first_slot(j, part) : store_row(record, j, part);
    if (args.weights.row_bytes != 0)
      copy_row(record + weights_offset(), weights(j), args.weights.row_bytes, part);
    return true;
  }

  __device__ __forceinline__ bool receive(const Regions& regions) const {
    const PeerPointers& peers = args.exchange.peers;
    const int32_t *const received = block[PeerRows::kReceived], *const sent = block[PeerRows::kSent];
    const int64_t last = received[peers.ranks], own = received[peers.rank];
    const int64_t own_rows = received[peers.rank + 1] - own;
    int64_t unused_rows = args.received_rows > last ? args.received_rows - last : 0;
    if (args.slots.slot && args.slots.capacity > unused_rows) unused_rows = args.slots.capacity;
    const uint32_t unused_chunks = chunks_of(args.exchange, unused_rows);
    const uint32_t early = unused_chunks + chunks_of(args.exchange, own_rows);
    const uint32_t others = peers.ranks - 1;
    const uint32_t units = early + others * most_chunks(args.exchange, received);
    const RowPart part(args.exchange.chunk_rows);
    return for_units(&args.exchange.state->receive_ticket, block, units, [&](uint32_t unit) {
      const int64_t chunk_rows = args.exchange.chunk_rows;
      if (unit < unused_chunks) {
        clear_unused(unit * chunk_rows + part.row, last, part);
        return true;
      }
      if (unit < early) {
        const int64_t i = (unit - unused_chunks) * chunk_rows + part.row;
        if (i < own_rows) copy_own_row(sent[peers.rank] + i, own + i, part);
        return true;
      }
      // The rank before this one puts its first rows here, then the one before that.
      const uint32_t turn = (unit - early) % others;
      return receive_chunk(regions, static_cast<int>((peers.rank + others - turn) % peers.ranks),
                           (unit - early) / others, part);
    });
  }
};

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    dispatch_kernel(const __grid_constant__ DispatchArgs args, int steps) {
  __shared__ BlockMemory block;
  const Dispatch dispatch{args, block};
  const ExchangeCall call{static_cast<uint32_t>(dispatch.stride()), args.place,
                          ExchangeWait::kDispatchCredit};
  run_steps(
      args.exchange, block, steps, call,
      [&](const Regions& regions) {
        return put_rows(regions, block, PeerRows::kSent, PeerRows::kPut, call,
                        [&](int64_t n, int rank, int64_t place, RowPart part) {
                          dispatch.put_row(regions, n, rank, place, part);
                        });
      },
      [&](const Regions& regions) { return dispatch.receive(regions); });
}

}  // namespace transformer_plugin::expert_parallel::one_sided
