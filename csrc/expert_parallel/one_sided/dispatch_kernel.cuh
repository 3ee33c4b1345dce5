// dispatch: token rows go to the ranks of their experts (DispatchArgs).
//
// Units of work are chunks of 16 rows; a warp copies a row, four 16-byte words a lane at a time. A block that receives zeroes
// the rows past the last received one and copies this rank's own rows first, because these do not wait for anyone.
#pragma once

#include "expert_parallel/one_sided/exchange.cuh"

namespace transformer_plugin::expert_parallel::one_sided {

// Copies the rows of both payloads of record `n` from the input.
struct DispatchSource {
  const DispatchArgs& args;

  __device__ __forceinline__ void copy(int64_t n, char* row, char* weights) const {
    const Exchange& exchange = args.exchange;
    const int64_t token = exchange.records[exchange.max_tokens * exchange.destinations + n];
    if (token >= args.tokens) {
      clear_row(row, args.rows.row_bytes);
      if (args.weights.row_bytes != 0) clear_row(weights, args.weights.row_bytes);
      return;
    }
    copy_row(static_cast<const char*>(args.rows.input) + token * args.rows.row_bytes, row,
             args.rows.row_bytes);
    if (args.weights.row_bytes == 0) return;
    copy_row(static_cast<const char*>(args.weights.input) + token * args.weights.row_bytes, weights,
             args.weights.row_bytes);
  }
};

struct DispatchReceiver {
  const DispatchArgs& args;
  const Regions& regions;
  BlockMemory& block;
  int64_t weights_offset;
  int64_t stride;

  __device__ __forceinline__ char* row(int64_t j) const {
    return static_cast<char*>(args.rows.output) + j * args.rows.row_bytes;
  }
  __device__ __forceinline__ char* weights(int64_t j) const {
    return static_cast<char*>(args.weights.output) + j * args.weights.row_bytes;
  }

  __device__ __forceinline__ void clear(int64_t j) const {
    clear_row(row(j), args.rows.row_bytes);
    if (args.weights.row_bytes != 0) clear_row(weights(j), args.weights.row_bytes);
  }

  // Called by all threads of a block.
  __device__ __forceinline__ bool receive_chunk(int source, int64_t chunk) const {
    const int32_t* const received = block[PeerRows::kReceived];
    const int64_t begin = received[source], j = begin + chunk * kChunkRows + warp_of_thread();
    const int rank = args.exchange.peers.rank;
    if (begin + chunk * kChunkRows >= received[source + 1]) return true;
    const int64_t place = block.place(PeerRows::kReceived, source, rank);
    const bool is_late = threadIdx.x == 0 && !wait_for_rows(regions, regions.flag(rank, place, source, chunk),
                                                            source, ExchangeWait::kDispatchRows);
    if (__syncthreads_or(is_late)) return false;
    if (j >= received[source + 1]) return true;
    const char* const record = regions.data(rank) + (place + j - begin) * stride;
    copy_row(record, row(j), args.rows.row_bytes);
    if (args.weights.row_bytes != 0) copy_row(record + weights_offset, weights(j), args.weights.row_bytes);
    return true;
  }

  __device__ __forceinline__ bool run() const {
    const PeerPointers& peers = args.exchange.peers;
    const int32_t *const received = block[PeerRows::kReceived], *const sent = block[PeerRows::kSent];
    const int64_t last = received[peers.ranks], own = received[peers.rank];
    const int64_t own_rows = received[peers.rank + 1] - own;
    const int64_t unused_rows = args.received_rows > last ? args.received_rows - last : 0;
    const uint32_t unused_chunks = static_cast<uint32_t>(chunks_of(unused_rows));
    const uint32_t early = unused_chunks + static_cast<uint32_t>(chunks_of(own_rows));
    const uint32_t others = peers.ranks - 1;
    const uint32_t units = early + others * most_chunks(received, peers);
    return for_units(&args.exchange.state->receive_ticket, block, units, [&](uint32_t unit) {
      if (unit < unused_chunks) {
        const int64_t j = last + int64_t{unit} * kChunkRows + warp_of_thread();
        if (j < args.received_rows) clear(j);
        return true;
      }
      if (unit < early) {
        const int64_t i = int64_t{unit - unused_chunks} * kChunkRows + warp_of_thread();
        if (i < own_rows) DispatchSource{args}.copy(sent[peers.rank] + i, row(own + i), weights(own + i));
        return true;
      }
      // The rank before this one puts its first rows here, then the one before that.
      const uint32_t turn = (unit - early) % others;
      return receive_chunk(static_cast<int>((peers.rank + others - turn) % peers.ranks),
                           (unit - early) / others);
    });
  }
};

__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    dispatch_kernel(const __grid_constant__ DispatchArgs args, int mode) {
  __shared__ BlockMemory block;
  const int64_t weights_offset = record_stride(args.rows.row_bytes, 0);
  const int64_t stride = record_stride(args.rows.row_bytes, args.weights.row_bytes);
  run_halves(
      args.exchange, block, mode,
      [&](const Regions& regions) {
        return put_rows(
            regions, block, PeerRows::kSent, PeerRows::kPut, stride, ExchangeWait::kDispatchCredit,
            [&](int64_t n, char* record) { DispatchSource{args}.copy(n, record, record + weights_offset); });
      },
      [&](const Regions& regions) {
        return DispatchReceiver{args, regions, block, weights_offset, stride}.run();
      });
}

}  // namespace transformer_plugin::expert_parallel::one_sided
