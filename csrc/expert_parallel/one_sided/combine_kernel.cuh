// combine: rows come back to the ranks of their tokens and are summed there (CombineArgs).
//
// A block puts a chunk of received rows at a time, one or several warps for each row. Warps receive each on their own: a token, or a
// part of one where tokens are few, as soon as the chunks that contain its records have arrived. Both sum a list of rows
// that the warp keeps in dynamic shared memory. Lanes have words of 16 bytes, with up to four loads at once.
#pragma once

#include "expert_parallel/one_sided/exchange.cuh"
#include "routing/rows_cuda.cuh"

namespace transformer_plugin::expert_parallel::one_sided {

using routing::Elements;
using routing::load_once;
using routing::Sum;

// What a warp sums: rows of `rows` (i >= 0), and records that have arrived (~i). The rows begin .. end - 1 of the list are those of
// this rank's own record, whose sum is rounded before it is added.
struct SumList {
  int32_t* entries;
  int count;
  int begin;
  int end;
};

// Adds the slots of received row `j` to the list, in ascending order: counts for each how many come before it. Called by a warp.
__device__ __forceinline__ void add_slots(const CombineArgs& args, int64_t j, SumList& list) {
  const int32_t* const slots = args.slot + j * args.topk;
  const int topk = static_cast<int>(args.topk);
  const auto is_slot = [&](int32_t s) { return s >= 0 && s < args.capacity; };
  list.begin = list.end = list.count;
  for (int first = 0; first < topk; first += kWarpSize) {
    const int k = first + lane_of_thread();
    const int32_t s = k < topk ? slots[k] : -1;
    int place = list.begin;
    for (int other_first = 0; other_first < topk; other_first += kWarpSize) {
      const int32_t of_lane = other_first == first                    ? s
                              : other_first + lane_of_thread() < topk ? slots[other_first + lane_of_thread()]
                                                                      : -1;
      for (int i = 0; i < kWarpSize && other_first + i < topk; ++i) {
        const int32_t other = __shfl_sync(kAllLanes, of_lane, i);
        place += is_slot(other) && (other < s || (other == s && other_first + i < k));
      }
    }
    if (is_slot(s)) list.entries[place] = s;
    list.end += __popc(__ballot_sync(kAllLanes, is_slot(s)));
  }
  list.count = list.end;
}

// A token, and this rank's own received row of it, or -1.
struct TokenList {
  SumList list;
  int64_t own_row;
};

// Where the rows of a list are, in words of N elements.
template <typename T, int N>
struct Rows {
  using Word = typename Elements<T, N>::Word;
  const char* rows;
  const char* arrived;  // the records of the region
  uint32_t row_bytes;
  uint32_t stride;  // from one record to the next

  __device__ __forceinline__ const Word* operator[](int32_t entry) const {
    const bool is_row = entry >= 0;
    const uint32_t i = is_row ? entry : ~entry;
    return reinterpret_cast<const Word*>((is_row ? rows : arrived) +
                                         uint64_t{i} * (is_row ? row_bytes : stride));
  }
  __device__ __forceinline__ int words() const { return static_cast<int>(row_bytes / sizeof(Word)); }
};

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

// Stores the sum of a list, of which a lane has kWords words of kRows rows in flight. More than kRows rows: kWords is 1.
template <int kRows, int kWords, typename T, int N>
__device__ __forceinline__ void sum_words(const Rows<T, N>& rows, const SumList& list, RowPart part,
                                          typename Rows<T, N>::Word* out) {
  using Word = typename Rows<T, N>::Word;
  const int words = rows.words();
  for (int w = part.begin(kWords); w < words; w += part.step(kWords)) {
    Elements<T, N> sum = zero_elements<T, N>(), own = zero_elements<T, N>();
    for (int first = 0; first == 0 || (kWords == 1 && first < list.count); first += kRows) {
      // Defined also where nothing is loaded: otherwise registers keep words of an earlier iteration, and spill.
      Word loaded[kWords][kRows] = {};
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        if (first + u >= list.count) continue;
        const Word* const row = rows[list.entries[first + u]];
#pragma unroll
        for (int v = 0; v < kWords; ++v)
          if (w + v * kWarpSize < words) loaded[v][u] = load_once(row + w + v * kWarpSize);
      }
#pragma unroll
      for (int v = 0; v < kWords; ++v) {
        if (kWords > 1) sum = own = zero_elements<T, N>();
#pragma unroll
        for (int u = 0; u < kRows; ++u) {
          const int i = first + u;
          if (i >= list.count) continue;
          if (i < list.begin || i >= list.end) {
            add<T, N>(sum, loaded[v][u]);
          } else {
            add<T, N>(own, loaded[v][u]);
            if (i + 1 == list.end) add<T, N>(sum, own.rounded());
          }
        }
        if (kWords > 1 && w + v * kWarpSize < words) out[w + v * kWarpSize] = sum.rounded();
      }
    }
    if (kWords == 1) out[w] = sum.rounded();
  }
}

template <typename T, int N>
__device__ __forceinline__ void sum_rows(const Rows<T, N>& rows, const SumList& list, RowPart part,
                                         void* out) {
  auto* const words = static_cast<typename Rows<T, N>::Word*>(out);
  if (list.count <= 2) return sum_words<2, 2>(rows, list, part, words);
  sum_words<4, 1>(rows, list, part, words);
}

// How many warps share a token: several where tokens are few, so that each warp of the launch has one or two parts.
__device__ __forceinline__ int warps_of_token(int64_t tokens) {
  const int64_t warps = int64_t{gridDim.x} * kWarps;
  int parts = 1;
  while (parts < kWarps && parts * tokens <= warps) parts *= 2;
  return parts;
}

// T: of the rows. N: elements of a word.
template <typename T, int N>
struct Combine {
  const CombineArgs& args;
  BlockMemory& block;
  int64_t weights_offset;
  int64_t stride;

  __device__ __forceinline__ SumList empty_list() const {
    const int64_t most = (args.slot ? args.topk : 1) + args.exchange.destinations;
    return {dynamic_words() + warp_of_thread() * most, 0, 0, 0};
  }
  __device__ __forceinline__ Rows<T, N> rows(const char* region) const {
    return {static_cast<const char*>(args.rows), region, static_cast<uint32_t>(args.width * sizeof(T)),
            static_cast<uint32_t>(stride)};
  }
  // Adds received row `j`, or its slots. Called by a warp.
  __device__ __forceinline__ void add_received(int64_t j, SumList& list) const {
    if (args.slot) return add_slots(args, j, list);
    if (lane_of_thread() == 0) list.entries[list.count] = static_cast<int32_t>(j);
    list.begin = list.count;
    list.end = ++list.count;
  }

  // Stores received row `j` in the region of another rank. Called by a warp.
  __device__ __forceinline__ void put_row(int64_t j, char* record, RowPart part) const {
    SumList list = empty_list();
    __syncwarp();  // all lanes have read the list of the row before
    add_received(j, list);
    __syncwarp();
    sum_rows(rows(nullptr), list, part, record);
    const auto* const from = static_cast<const Sum<T>*>(args.weights) + j * args.weights_width;
    auto* const to = reinterpret_cast<Sum<T>*>(record + weights_offset);
    for (int64_t w = part.begin(1); w < args.weights_width; w += part.step(1)) to[w] = from[w];
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

  // Where a record to another rank comes back, after the wait for its chunk; -1 if that took too long.
  __device__ __forceinline__ int32_t wait_for_record(const Regions& regions, int32_t record) const {
    const Exchange& exchange = args.exchange;
    const int rank = exchange.peers.rank, chunk_rows = exchange.chunk_rows, to = rank_of(record);
    const int64_t place = block.place(PeerRows::kSent, to, rank);
    const int32_t row = record - block[PeerRows::kSent][to];
    const bool is_there = wait_for_rows(regions, regions.flag(rank, place, to, row / chunk_rows), to,
                                        ExchangeWait::kCombineRows);
    return is_there ? static_cast<int32_t>(place) + row : -1;
  }

  // The list of token `t`, whose records have all arrived. False if a wait took too long. Called by a warp.
  __device__ __forceinline__ bool list_token(const Regions& regions, int64_t t, TokenList& token) const {
    const Exchange& exchange = args.exchange;
    const int rank = exchange.peers.rank, most = static_cast<int>(exchange.destinations);
    const int32_t* const records = exchange.records + t * most;  // -1 after the last
    int count = 0, own = -1;                                     // own: which of them is to this rank itself
    for (int first = 0; first < most; first += kWarpSize) {
      const int m = first + lane_of_thread();
      const int32_t record = m < most ? records[m] : -1;
      count += __popc(__ballot_sync(kAllLanes, record >= 0));
      const bool is_own = record >= 0 && rank_of(record) == rank;
      const unsigned owner = __ballot_sync(kAllLanes, is_own);
      if (owner == 0) continue;
      const int lane = __ffs(static_cast<int>(owner)) - 1;
      own = first + lane;
      token.own_row = block[PeerRows::kReceived][rank] + __shfl_sync(kAllLanes, record, lane) -
                      block[PeerRows::kSent][rank];
    }
    SumList& list = token.list;
    list.count = list.begin = list.end = own < 0 ? count : own;
    if (own >= 0) add_received(token.own_row, list);
    bool is_late = false;
    for (int m = lane_of_thread(); m < count; m += kWarpSize) {
      if (m == own) continue;
      const int32_t place = wait_for_record(regions, records[m]);
      is_late = is_late || place < 0;
      list.entries[m < list.begin ? m : m - 1 + list.end - list.begin] = ~place;
    }
    if (own >= 0) list.count += count - own - 1;
    return !__any_sync(kAllLanes, is_late);
  }

  // The second payload of a token: its records have one row of weights each.
  __device__ __forceinline__ void sum_weights(const TokenList& token, int64_t t, const char* region,
                                              RowPart part) const {
    const SumList& list = token.list;
    const int64_t width = args.weights_width;
    const auto* const own = static_cast<const Sum<T>*>(args.weights) + token.own_row * width;
    for (int64_t w = part.begin(1); w < width; w += part.step(1)) {
      Sum<T> sum = 0;
      const auto add_records = [&](int first, int end) {
        for (int i = first; i < end; ++i) {
          const char* const record = region + ~list.entries[i] * stride + weights_offset;
          sum += reinterpret_cast<const Sum<T>*>(record)[w];
        }
      };
      add_records(0, list.begin);
      if (token.own_row >= 0) sum += own[w];
      add_records(list.end, list.count);
      static_cast<Sum<T>*>(args.weights_output)[t * width + w] = sum;
    }
  }

  __device__ __forceinline__ void receive(const Regions& regions) const {
    const Exchange& exchange = args.exchange;
    const char* const region = regions.data(exchange.peers.rank);
    const int parts = warps_of_token(args.tokens);
    const uint32_t units = static_cast<uint32_t>(args.tokens) * parts;
    uint32_t* const ticket = &exchange.state->receive_ticket;
    for (uint32_t unit = __shfl_sync(kAllLanes, take_unit(ticket), 0); unit < units;) {
      const uint32_t next = take_unit(ticket);  // comes while the warp works
      const int64_t t = unit / parts;
      const RowPart part(unit % parts, parts);
      TokenList token{empty_list(), -1};
      __syncwarp();  // all lanes have read the list of the token before
      if (!list_token(regions, t, token)) return;
      __syncwarp();
      sum_rows(rows(region), token.list, part,
               static_cast<char*>(args.output) + t * args.width * static_cast<int64_t>(sizeof(T)));
      if (args.weights_width > 0) sum_weights(token, t, region, part);
      unit = __shfl_sync(kAllLanes, next, 0);
    }
  }
};

template <typename T, int N>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    combine_kernel(const __grid_constant__ CombineArgs args, int steps) {
  __shared__ BlockMemory block;
  const int64_t row_bytes = args.width * static_cast<int64_t>(sizeof(T));
  const int64_t weights_bytes = args.weights_width * static_cast<int64_t>(sizeof(Sum<T>));
  const Combine<T, N> combine{args, block, record_stride(row_bytes, 0),
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
      [&](const Regions& regions) { combine.receive(regions); });
}

}  // namespace transformer_plugin::expert_parallel::one_sided
