// The end of a plan: receive_kernel (plan_kernels.cuh).
#pragma once

#include "expert_parallel/one_sided/plan_chunk.cuh"

namespace transformer_plugin::expert_parallel::one_sided {

// Whether the capacity drops slots, as assign_kernel found.
__device__ __forceinline__ bool drops_slots(const PlanArgs& args) {
  return args.capacity_may_overflow && args.first_slots[args.experts] != 0;
}

// The first block writes what the plan says about the rows between ranks. `from_to(q, r)`: the rows that rank q sends to rank r.
template <typename FromTo>
__device__ __forceinline__ void write_peer_rows(const PlanArgs& args, const int32_t* first_row,
                                                const int32_t* first_record, FromTo from_to) {
  const int me = args.peers.rank, ranks = args.peers.ranks, ends = ranks + 1;
  if (threadIdx.x < ends) {
    args.peer_rows[threadIdx.x] = first_row[threadIdx.x];
    args.peer_rows[ends + threadIdx.x] = first_record[threadIdx.x];
  }
  for (int r = warp_in_block(); r < ends; r += kPlanWarps) {
    uint32_t put = 0, returned = 0;
    for (int q = lane_in_warp(); q < me && r < ranks; q += kWarpSize) {
      if (q == r || r == me) continue;  // a rank's own rows do not travel
      put += static_cast<uint32_t>(from_to(q, r));
      returned += static_cast<uint32_t>(from_to(r, q));
    }
    put = __reduce_add_sync(kWholeWarp, put);
    returned = __reduce_add_sync(kWholeWarp, returned);
    if (lane_in_warp() != 0) continue;
    args.peer_rows[2 * ends + r] = static_cast<int32_t>(put);
    args.peer_rows[3 * ends + r] = static_cast<int32_t>(returned);
  }
}

// Shared memory of receive_slots().
struct ReceiveMemory {
  int32_t rows[kMostPeers], records[kMostPeers];  // from and to each rank
  int32_t first_row[kMostPeers + 1], first_record[kMostPeers + 1], first_place[kMostPeers];
  bool is_bounded;  // then first_place is known
};

// A thread has one slot of a row at a time. Called by all threads.
__device__ __forceinline__ void receive_slots(const PlanArgs& args, Chunk& chunk, ReceiveMemory& shared) {
  auto& [rows, records, first_row, first_record, first_place, is_bounded] = shared;
  const int me = args.peers.rank, ranks = args.peers.ranks, r = threadIdx.x;
  const bool begins = begin_step(args, chunk, false, [&](Chunk&) {
    if (r == 0) is_bounded = drops_slots(args);
    if (r < ranks && args.capacity_may_overflow) first_place[r] = args.received_places[r];
  });
  const bool has_come = begins && wait_for_ranks(args, PlanWait::kSlots, chunk.epoch);
  if (blockIdx.x == 0 && r == 0) distributed::count_end(args.marks, &args.state->is_published);
  if (!has_come) return;
  const int32_t* const sent = words_of(args, me, args.layout.sent);
  const auto from_to = [&](int from, int to) { return __ldcg(sent + from * ranks + to); };
  if (r < ranks) {
    rows[r] = from_to(r, me);
    records[r] = from_to(me, r);
  }
  __syncthreads();
  if (r <= ranks) {
    int32_t row = 0, record = 0;
    for (int q = 0; q < r; ++q) {
      row += rows[q];
      record += records[q];
    }
    first_row[r] = row;
    first_record[r] = record;
    if (r < ranks && !is_bounded) first_place[r] = row;
  }
  __syncthreads();
  if (blockIdx.x == 0) write_peer_rows(args, first_row, first_record, from_to);
  const int32_t* const slots = words_of(args, me, args.layout.slots);
  const auto topk = static_cast<uint32_t>(args.topk);
  const uint32_t step = gridDim.x * kPlanThreads, end = static_cast<uint32_t>(args.received_rows) * topk;
  for (uint32_t i = blockIdx.x * kPlanThreads + threadIdx.x; i < end; i += step) {
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
}

static __global__ void __launch_bounds__(kPlanThreads) receive_kernel(const __grid_constant__ PlanArgs args) {
  __shared__ Chunk chunk;
  __shared__ ReceiveMemory memory;
  receive_slots(args, chunk, memory);
}

}  // namespace transformer_plugin::expert_parallel::one_sided
