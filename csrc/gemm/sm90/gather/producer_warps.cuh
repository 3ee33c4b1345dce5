// What the producer warpgroups of the kernels that gather an operand share (grouped_gemm_gather.cuh,
// grouped_wgrad_gather.cuh).
#pragma once

#include "common/ptx/mbarrier.cuh"
#include "gemm/sm90/pipeline.cuh"

namespace transformer_plugin::gemm::sm90 {

inline constexpr int kProducerWarps = kWarpgroupSize / kWarpSize;

// Starts the load of one box of B for a stage that is empty and that the caller announces. Called by all lanes of a
// producer warp, each of which has the box of its number: load(to, box, barrier, multicast) starts its load. Of
// columns that the CTAs share, each CTA loads half with multicast.
template <int boxes, typename Load>
__device__ __forceinline__ void load_box_of_warp(Stage& stage, uint64_t* full, int cta_rank, bool shares_b,
                                                 Load load) {
  static_assert(kBBoxes <= kProducerWarps, "a warp loads at most one box");
  const int count = shares_b ? boxes / kCluster : boxes, warp = threadIdx.x / kWarpSize;
  if (threadIdx.x % kWarpSize != 0 || warp >= count) return;
  const int box = (shares_b ? cta_rank * count : 0) + warp;
  load(stage.b[box], box, full, shares_b);
}

// Producer warpgroup: publishes the end of the tiles. All threads wait for the stage: otherwise one could arrive
// at `full` of the previous phase, for which another has yet to arrive.
template <typename SharedStorage>
__device__ __forceinline__ void publish_copied_end(SharedStorage& shared,
                                                   const PipelineState<SharedStorage>& state) {
  mbarrier_wait(&shared.empty[state.stage], state.phase ^ 1);
  if (threadIdx.x == 0) {
    store_tile_info(shared, state.stage, TileInfo::end());
    mbarrier_arrive(&shared.full[state.stage]);
  }
  mbarrier_arrive(&shared.full[state.stage]);
}

}  // namespace transformer_plugin::gemm::sm90
