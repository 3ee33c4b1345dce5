// Mainloop of grouped_gemm_mx_nv.cuh: two pipelines, and WGMMA with A dequantized into registers.
#pragma once

#include "common/ptx/barrier.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/wgmma.cuh"
#include "gemm/sm90/microscaled/dequantize_a_operand.cuh"
#include "gemm/sm90/pipeline.cuh"

namespace transformer_plugin::gemm::sm90 {

// Two rings of stages: quantized weights (A), whose boxes of 128 bytes last for kStepsPerBox steps, and BF16
// rows (B), one stage for each step of 64 elements of K.
struct MxNvSharedStorage {
  static constexpr int kAStages = 3, kStages = 4, kOutBoxes = 2;

  alignas(1024) uint8_t a[kAStages][kABoxes][kBoxBytes];
  alignas(1024) uint8_t b[kStages][kBBoxes][kBoxBytes];
  alignas(1024) uint8_t out[kConsumerWarpgroups][kOutBoxes][kBoxBytes];
  uint64_t a_full[kAStages], a_empty[kAStages];
  uint64_t b_full[kStages], b_empty[kStages];
};
static_assert(sizeof(MxNvSharedStorage) <= kMaxSharedBytes, "shared memory of a CTA");

struct ARing {
  static constexpr int kStages = MxNvSharedStorage::kAStages;
};
using APipelineState = PipelineState<ARing>;
using BPipelineState = PipelineState<MxNvSharedStorage>;

__device__ __forceinline__ void init_pipelines(MxNvSharedStorage& shared) {
  if (threadIdx.x == 0) {
    constexpr int kConsumerWarps = kCluster * kConsumerWarpgroups * kWarpgroupSize / kWarpSize;
    for (int i = 0; i < MxNvSharedStorage::kAStages; ++i) {
      mbarrier_init(&shared.a_full[i], 1);
      mbarrier_init(&shared.a_empty[i], kConsumerWarps);
    }
    for (int i = 0; i < MxNvSharedStorage::kStages; ++i) {
      mbarrier_init(&shared.b_full[i], 1);
      mbarrier_init(&shared.b_empty[i], kConsumerWarps);
    }
    fence_mbarrier_init();
  }
  cluster_sync();
}

// The part of a tile that a consumer warpgroup computes: 64 columns x 256 rows of the output.
struct SwapAbWarpgroupTile {
  int group, consumer;           // consumer warpgroup: 0 or 1
  int column, store_end_column;  // first column, and columns of the output
  int row, group_end;            // first row, and end of the group's rows
};

// Orders the WGMMAs of the two consumer warpgroups (as CUTLASS's OrderedSequenceBarrier): they start those of
// a step alternately. Then one warpgroup dequantizes while the tensor cores work for the other. It pays where
// dequantization takes long (MXFP8). A warpgroup without WGMMAs in a step takes its turn all the same.
template <bool ordered>
struct WarpgroupOrder {
  // Barriers of consumer 0 and of consumer 1 (pipeline.cuh), and their threads.
  static constexpr int kFirstBarrier = kBarrierOfBothConsumers, kBoth = kConsumerWarpgroups * kWarpgroupSize;
  int consumer;

  __device__ __forceinline__ explicit WarpgroupOrder(int consumer_index) : consumer(consumer_index) {
    if (ordered && consumer == 1) named_barrier_arrive(kFirstBarrier, kBoth);
  }
  __device__ __forceinline__ void wait_turn() const {
    if (ordered) named_barrier_sync(kFirstBarrier + consumer, kBoth);
  }
  __device__ __forceinline__ void pass_turn() const {
    if (ordered) named_barrier_arrive(kFirstBarrier + 1 - consumer, kBoth);
  }
  // After the last step: consumes the last arrival of the other warpgroup.
  __device__ __forceinline__ void finish() const {
    if (ordered && consumer == 0) named_barrier_sync(kFirstBarrier, kBoth);
  }
};
static_assert(kConsumerWarpgroups == 2, "two warpgroups alternate");

// Starts the WGMMAs of one step: M = 64 weights' rows, N = half_count * 128 rows of the buffer, K = 64.
template <int half_count>
__device__ __forceinline__ void wgmma_step(float (&acc)[kAccumulators], const DequantizedChunk (&values)[2],
                                           uint64_t b) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kStepElements / kWgmmaK; ++i) {  // K = 16 is 32 bytes: 2 descriptor units
    const uint32_t a[] = {values[0][i * 2], values[1][i * 2], values[0][i * 2 + 1], values[1][i * 2 + 1]};
    wgmma_a_in_registers<half_count>(acc, a, b + i * 2);
  }
  wgmma_commit();
}

// Accumulates a warpgroup's tile. The WGMMAs of a step start before those of the previous step have finished;
// when these have, the registers of their A fragment are free for the fragment of the next step, which is
// dequantized while the WGMMAs run.
template <typename Format, int half_count>
__device__ __forceinline__ void mma_dequantized(const GroupedGemmParams& args, const ByteScales& scales,
                                                MxNvSharedStorage& shared, APipelineState& a_state,
                                                BPipelineState& b_state,
                                                const WarpgroupOrder<Format::kOrderedWarpgroups>& order,
                                                int steps, const SwapAbWarpgroupTile& wg_tile,
                                                float (&acc)[kAccumulators]) {
  using Fragment = typename ADequantizer<Format>::Fragment;
  ADequantizer<Format> dequantizer(args, scales, wg_tile.group, wg_tile.column);
  const auto dequantize = [&](int step, Fragment& values) {
    if (step % kStepsPerBox<Format> == 0) mbarrier_wait(&shared.a_full[a_state.stage], a_state.phase);
    dequantizer.dequantize(shared.a[a_state.stage][wg_tile.consumer], step, values);
    if ((step + 1) % kStepsPerBox<Format> == 0 || step + 1 == steps) {
      consumer_release(&shared.a_empty[a_state.stage]);
      a_state.advance();
    }
  };
  int step = 0, previous = -1;  // stage that the WGMMAs of the previous step read
  // One step with fragment `current`; dequantizes the next step into `next`. Returns false after the last
  // step.
  const auto run_step = [&](Fragment& current, Fragment& next) {
    mbarrier_wait(&shared.b_full[b_state.stage], b_state.phase);
    order.wait_turn();
    wgmma_step<half_count>(acc, current, smem_desc_k_major(shared.b[b_state.stage]));
    order.pass_turn();
    wgmma_wait<1>();
    keep_alive(next);
    if (previous >= 0) consumer_release(&shared.b_empty[previous]);
    previous = b_state.stage;
    b_state.advance();
    if (++step == steps) return false;
    dequantize(step, next);
    return true;
  };
  Fragment even = {}, odd = {};
  dequantize(0, even);
#pragma unroll 1
  while (run_step(even, odd) && run_step(odd, even)) {
  }
  wgmma_wait<0>();
  keep_alive(even);
  keep_alive(odd);
  consumer_release(&shared.b_empty[previous]);
}

// Releases the stages of a tile of which the warpgroup has no part.
template <typename Format>
__device__ __forceinline__ void skip_tile(MxNvSharedStorage& shared, APipelineState& a_state,
                                          BPipelineState& b_state,
                                          const WarpgroupOrder<Format::kOrderedWarpgroups>& order,
                                          int steps) {
#pragma unroll 1
  for (int step = 0; step < steps; ++step, b_state.advance()) {
    if (step % kStepsPerBox<Format> == 0) {
      mbarrier_wait(&shared.a_full[a_state.stage], a_state.phase);
      consumer_release(&shared.a_empty[a_state.stage]);
      a_state.advance();
    }
    mbarrier_wait(&shared.b_full[b_state.stage], b_state.phase);
    order.wait_turn();
    order.pass_turn();
    consumer_release(&shared.b_empty[b_state.stage]);
  }
}

}  // namespace transformer_plugin::gemm::sm90
