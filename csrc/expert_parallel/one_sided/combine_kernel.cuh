// combine: rows come back to the ranks of their tokens and are summed there (CombineArgs).
//
// A unit of work that puts is a chunk of received rows, one or several warps for each: they copy the row, or sum its slots. A unit
// that receives is as many tokens, as many warps for each: threads of the block wait for the chunks that contain records of these
// tokens, then each warp adds the records of its token. Lanes have 16-byte words, or single elements where widths or addresses do
// not allow more, with up to four loads at once. Dynamic shared memory: the sorted slots of one row for each warp.
#pragma once

#include "expert_parallel/one_sided/exchange.cuh"
#include "routing/rows_cuda.cuh"

namespace transformer_plugin::expert_parallel::one_sided {

using routing::Elements;
using routing::load_once;
using routing::Sum;

inline constexpr int kLoadsAtOnce = 4;

// Shared memory of a block, besides that of all exchanges.
struct CombineMemory {
  int32_t first[kMostPeers];  // of the unit's records to each rank
  int32_t last[kMostPeers];
  int32_t records[kWarps][kMostPeers];  // places of those of the token of each warp
};

// The slots of a received row in ascending order.
struct RowSlots {
  const int32_t* slots;
  int count;
};

// Sorts the slots of received row `j` by counting for each how many come before it. Called by a warp.
__device__ __forceinline__ RowSlots sort_slots(const CombineArgs& args, int64_t j, int32_t* sorted) {
  const int32_t* const slots = args.slot + j * args.topk;
  const int topk = static_cast<int>(args.topk);
  const auto is_slot = [&](int32_t s) { return s >= 0 && s < args.capacity; };
  unsigned count = 0;
  __syncwarp();  // all lanes have read the slots of the row before
  for (int k = lane_of_thread(); k < topk; k += kWarpSize) {
    const int32_t s = slots[k];
    if (!is_slot(s)) continue;
    int rank = 0;
    for (int i = 0; i < topk; ++i) {
      const int32_t other = slots[i];
      rank += is_slot(other) && (other < s || (other == s && i < k));
    }
    sorted[rank] = s;
    ++count;
  }
  __syncwarp();
  return {sorted, static_cast<int>(__reduce_add_sync(kAllLanes, count))};
}

template <typename T, int N>
__device__ __forceinline__ void add(Elements<T, N>& sum, typename Elements<T, N>::Word word) {
  const Elements<T, N> values(word);
#pragma unroll
  for (int i = 0; i < N; ++i) sum.at[i] = sum.at[i] + values.at[i];
}

template <typename T, int N>
__device__ __forceinline__ Elements<T, N> zero_elements() {
  Elements<T, N> sum;
#pragma unroll
  for (int i = 0; i < N; ++i) sum.at[i] = 0;
  return sum;
}

// Calls store(w, word) with the sum of the words w of `count` rows, for those of 0 .. words - 1 in the part of the warp. `row(i)` is
// row i, of words. A lane has one word and four rows in flight.
template <typename T, int N, typename Row, typename Store>
__device__ __forceinline__ void sum_many_rows(int count, int words, RowPart part, Row row, Store store) {
  using Word = typename Elements<T, N>::Word;
  for (int w = part.begin(1); w < words; w += part.step(1)) {
    Elements<T, N> sum = zero_elements<T, N>();
    for (int first = 0; first < count; first += kLoadsAtOnce) {
      Word loaded[kLoadsAtOnce];
#pragma unroll
      for (int u = 0; u < kLoadsAtOnce; ++u)
        if (first + u < count) loaded[u] = load_once(row(first + u) + w);
#pragma unroll
      for (int u = 0; u < kLoadsAtOnce; ++u)
        if (first + u < count) add<T, N>(sum, loaded[u]);
    }
    store(w, sum.rounded());
  }
}

// The same of one or two rows, of which a lane has four or two words in flight.
template <typename T, int N, int kRows, typename Row, typename Store>
__device__ __forceinline__ void sum_few_rows(int words, RowPart part, Row row, Store store) {
  using Word = typename Elements<T, N>::Word;
  constexpr int kWords = kLoadsAtOnce / kRows;
  for (int w = part.begin(kWords); w < words; w += part.step(kWords)) {
    Word loaded[kWords][kRows];
#pragma unroll
    for (int v = 0; v < kWords; ++v) {
#pragma unroll
      for (int u = 0; u < kRows; ++u)
        if (w + v * kWarpSize < words) loaded[v][u] = load_once(row(u) + w + v * kWarpSize);
    }
#pragma unroll
    for (int v = 0; v < kWords; ++v) {
      Elements<T, N> sum = zero_elements<T, N>();
#pragma unroll
      for (int u = 0; u < kRows; ++u) add<T, N>(sum, loaded[v][u]);
      if (w + v * kWarpSize < words) store(w + v * kWarpSize, sum.rounded());
    }
  }
}

template <typename T, int N, typename Row, typename Store>
__device__ __forceinline__ void sum_rows(int count, int words, RowPart part, Row row, Store store) {
  if (count == 1) return sum_few_rows<T, N, 1>(words, part, row, store);
  if (count == 2) return sum_few_rows<T, N, 2>(words, part, row, store);
  sum_many_rows<T, N>(count, words, part, row, store);
}

// Rows of T as words, of one payload.
template <typename T, int N>
struct Rows {
  using Word = typename Elements<T, N>::Word;
  const T* rows;
  T* output;
  int64_t width;

  __device__ __forceinline__ int words() const { return static_cast<int>(width / N); }
  __device__ __forceinline__ const Word* row(int64_t i) const {
    return reinterpret_cast<const Word*>(rows + i * width);
  }
  __device__ __forceinline__ Word* out(int64_t token) const {
    return reinterpret_cast<Word*>(output + token * width);
  }
};

// output[0] = the sum of the slots of one received row.
template <typename T, int N>
__device__ __noinline__ void sum_slots_of_row(RowSlots own, Rows<T, N> rows, RowPart part) {
  using Word = typename Rows<T, N>::Word;
  Word* const out = rows.out(0);
  sum_rows<T, N>(
      own.count, rows.words(), part, [&](int i) { return rows.row(own.slots[i]); },
      [&](int w, Word word) { out[w] = word; });
}

// The records of one token, which a warp adds.
struct TokenRecords {
  const int32_t* records;  // their places in the region
  int count;
  int own;              // which of them is to this rank itself, or -1
  int64_t own_row;      // the received row of that one
  const char* arrived;  // records of this payload in the region, `stride` bytes apart
  int64_t stride;
};

// Loops over the words of a row are functions that are called, not inlined: they then have all registers of a thread.
template <typename T, int N>
__device__ __noinline__ void sum_token(TokenRecords token, Rows<T, N> rows, int64_t t, RowPart part) {
  using Word = typename Rows<T, N>::Word;
  Word* const out = rows.out(t);
  sum_rows<T, N>(
      token.count, rows.words(), part,
      [&](int m) {
        return m == token.own
                   ? rows.row(token.own_row)
                   : reinterpret_cast<const Word*>(token.arrived + token.records[m] * token.stride);
      },
      [&](int w, Word word) { out[w] = word; });
}

// The same where the row of the own record is the sum of slots, which is rounded before it is added.
template <typename T, int N>
__device__ __noinline__ void sum_token_with_slots(TokenRecords token, Rows<T, N> rows, RowSlots own,
                                                  int64_t t, RowPart part) {
  using Word = typename Rows<T, N>::Word;
  Word* const out = rows.out(t);
  sum_many_rows<T, N>(
      own.count, rows.words(), part, [&](int i) { return rows.row(own.slots[i]); },
      [&](int w, Word own_word) {
        Elements<T, N> sum = zero_elements<T, N>();
        for (int first = 0; first < token.count; first += kLoadsAtOnce) {
          Word words[kLoadsAtOnce];
#pragma unroll
          for (int u = 0; u < kLoadsAtOnce; ++u) {
            const int m = first + u;
            if (m >= token.count) continue;
            const char* const record = token.arrived + token.records[m] * token.stride;
            words[u] = m == token.own ? own_word : load_once(reinterpret_cast<const Word*>(record) + w);
          }
#pragma unroll
          for (int u = 0; u < kLoadsAtOnce; ++u)
            if (first + u < token.count) add<T, N>(sum, words[u]);
        }
        out[w] = sum.rounded();
      });
}

// The same of a token with one record besides the own one, whose words are loaded with the first ones of the slots.
template <typename T, int N>
__device__ __noinline__ void sum_two_with_slots(TokenRecords token, Rows<T, N> rows, RowSlots own, int64_t t,
                                                RowPart part) {
  using Word = typename Rows<T, N>::Word;
  Word* const out = rows.out(t);
  const bool own_is_first = token.own == 0;
  const auto* const record =
      reinterpret_cast<const Word*>(token.arrived + token.records[own_is_first] * token.stride);
  const int words = rows.words();
  for (int w = part.begin(1); w < words; w += part.step(1)) {
    const Word arrived = load_once(record + w);
    Elements<T, N> of_slots = zero_elements<T, N>();
    for (int first = 0; first < own.count; first += kLoadsAtOnce) {
      Word loaded[kLoadsAtOnce];
#pragma unroll
      for (int u = 0; u < kLoadsAtOnce; ++u)
        if (first + u < own.count) loaded[u] = load_once(rows.row(own.slots[first + u]) + w);
#pragma unroll
      for (int u = 0; u < kLoadsAtOnce; ++u)
        if (first + u < own.count) add<T, N>(of_slots, loaded[u]);
    }
    const Word own_word = of_slots.rounded();
    Elements<T, N> sum = zero_elements<T, N>();
    add<T, N>(sum, own_is_first ? own_word : arrived);
    add<T, N>(sum, own_is_first ? arrived : own_word);
    out[w] = sum.rounded();
  }
}

// Whether the rows of a payload are whole, aligned words of 16 bytes.
template <typename T>
__device__ __forceinline__ bool has_words(const void* rows, const void* output, int64_t width) {
  const uint64_t addresses = reinterpret_cast<uint64_t>(rows) | reinterpret_cast<uint64_t>(output);
  return width % kVectorSize<T> == 0 && addresses % sizeof(uint4) == 0;
}

// Calls fn with the Rows of a payload.
template <typename T, typename Fn>
__device__ __forceinline__ void visit_rows(const void* rows, void* output, int64_t width, Fn fn) {
  const T* const from = static_cast<const T*>(rows);
  T* const to = static_cast<T*>(output);
  if (has_words<T>(rows, output, width)) return fn(Rows<T, kVectorSize<T>>{from, to, width});
  fn(Rows<T, 1>{from, to, width});
}

template <typename T>
struct Combine {
  const CombineArgs& args;
  BlockMemory& block;
  CombineMemory& memory;
  int64_t weights_offset;
  int64_t stride;

  __device__ __forceinline__ int32_t* sorted_slots() const {
    return dynamic_words() + warp_of_thread() * args.topk;
  }
  __device__ __forceinline__ int64_t weights_bytes() const {
    return args.weights_width * static_cast<int64_t>(sizeof(Sum<T>));
  }

  // Stores received row `j` in the region of another rank. Called by a warp.
  __device__ __forceinline__ void put_row(int64_t j, char* record, RowPart part) const {
    if (args.slot) {
      const RowSlots own = sort_slots(args, j, sorted_slots());
      visit_rows<T>(args.rows, record, args.width, [&](auto rows) { sum_slots_of_row(own, rows, part); });
    } else {
      const int64_t bytes = args.width * static_cast<int64_t>(sizeof(T));
      copy_row(static_cast<const char*>(args.rows) + j * bytes, record, bytes, part);
    }
    if (args.weights_width == 0) return;
    copy_row(static_cast<const char*>(args.weights) + j * weights_bytes(), record + weights_offset,
             weights_bytes(), part);
  }

  // The rank to which a record of this rank goes.
  __device__ __forceinline__ int rank_of(int32_t record) const {
    const int32_t* const sent = block[PeerRows::kSent];
    int low = 0, high = args.exchange.peers.ranks;  // sent[low] <= record < sent[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (sent[middle] <= record ? low : high) = middle;
    }
    return low;
  }

  // Reads the records of token `t` into shared memory, and notes the first and last ones to each rank. Called by a warp.
  __device__ __forceinline__ TokenRecords read_records(int64_t t, const char* region) const {
    const Exchange& exchange = args.exchange;
    const int rank = exchange.peers.rank;
    int32_t* const records = memory.records[warp_of_thread()];
    TokenRecords token{records, 0, -1, 0, region, stride};
    const int destinations = static_cast<int>(exchange.destinations);
    for (int first = 0; first < destinations; first += kWarpSize) {
      const int m = first + lane_of_thread();
      const int32_t record = m < destinations ? exchange.records[t * exchange.destinations + m] : -1;
      const int to = record >= 0 ? rank_of(record) : -1;
      if (record >= 0) {
        records[m] = record - block[PeerRows::kSent][to] +
                     static_cast<int32_t>(block.place(PeerRows::kSent, to, rank));
      }
      if (record >= 0 && to != rank) {
        atomicMin(&memory.first[to], record);
        atomicMax(&memory.last[to], record);
      }
      token.count += __popc(__ballot_sync(kAllLanes, record >= 0));
      const unsigned own = __ballot_sync(kAllLanes, record >= 0 && to == rank);
      if (own != 0) token.own = first + __ffs(static_cast<int>(own)) - 1;
    }
    __syncwarp();
    if (token.own >= 0)
      token.own_row = block[PeerRows::kReceived][rank] + records[token.own] - block[PeerRows::kSent][rank];
    return token;
  }

  // Waits for the chunks that contain records first .. last to a rank; each thread waits for one rank.
  __device__ __forceinline__ bool wait_for_chunks(const Regions& regions) const {
    const PeerPointers& peers = args.exchange.peers;
    const int rank = threadIdx.x;
    if (rank >= peers.ranks || memory.last[rank] < 0) return true;
    const int64_t begin = block[PeerRows::kSent][rank];
    const int64_t chunk_rows = args.exchange.chunk_rows, end = (memory.last[rank] - begin) / chunk_rows;
    const int64_t place = block.place(PeerRows::kSent, rank, peers.rank);
    for (int64_t chunk = (memory.first[rank] - begin) / chunk_rows; chunk <= end; ++chunk) {
      if (!wait_for_rows(regions, regions.flag(peers.rank, place, rank, chunk), rank,
                         ExchangeWait::kCombineRows))
        return false;
    }
    return true;
  }

  __device__ __forceinline__ void sum_payloads(TokenRecords token, int64_t t, RowPart part) const {
    const bool has_own_slots = args.slot && token.own >= 0;
    RowSlots own{};
    if (has_own_slots) own = sort_slots(args, token.own_row, sorted_slots());
    visit_rows<T>(args.rows, args.output, args.width, [&](auto rows) {
      if (!has_own_slots) return sum_token(token, rows, t, part);
      token.count == 2 ? sum_two_with_slots(token, rows, own, t, part)
                       : sum_token_with_slots(token, rows, own, t, part);
    });
    if (args.weights_width == 0) return;
    token.arrived += weights_offset;
    visit_rows<Sum<T>>(args.weights, args.weights_output, args.weights_width,
                       [&](auto rows) { sum_token(token, rows, t, part); });
  }

  __device__ __forceinline__ bool receive(const Regions& regions) const {
    const char* const region = regions.data(args.exchange.peers.rank);
    const uint32_t units = chunks_of(args.exchange, args.tokens);
    const RowPart part(args.exchange.chunk_rows);
    return for_units(&args.exchange.state->receive_ticket, block, units, [&](uint32_t unit) {
      if (threadIdx.x < kMostPeers) {
        memory.first[threadIdx.x] = 0x7fffffff;
        memory.last[threadIdx.x] = -1;
      }
      __syncthreads();
      const int64_t t = int64_t{unit} * args.exchange.chunk_rows + part.row;
      TokenRecords token{};
      if (t < args.tokens) token = read_records(t, region);
      __syncthreads();
      if (__syncthreads_or(!wait_for_chunks(regions))) return false;
      if (t < args.tokens) sum_payloads(token, t, part);
      return true;
    });
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    combine_kernel(const __grid_constant__ CombineArgs args, int steps) {
  __shared__ BlockMemory block;
  __shared__ CombineMemory memory;
  const int64_t row_bytes = args.width * static_cast<int64_t>(sizeof(T));
  const int64_t weights_bytes = args.weights_width * static_cast<int64_t>(sizeof(Sum<T>));
  const Combine<T> combine{args, block, memory, record_stride(row_bytes, 0),
                           record_stride(row_bytes, weights_bytes)};
  const ExchangeCall call{static_cast<uint32_t>(combine.stride), {}, ExchangeWait::kCombineCredit};
  run_steps(
      args.exchange, block, steps, call,
      [&](const Regions& regions) {
        return put_rows(regions, block, PeerRows::kReceived, PeerRows::kReturned, call,
                        [&](int64_t j, int rank, int64_t place, RowPart part) {
                          combine.put_row(j, regions.data(rank) + place * combine.stride, part);
                        });
      },
      [&](const Regions& regions) { return combine.receive(regions); });
}

}  // namespace transformer_plugin::expert_parallel::one_sided
