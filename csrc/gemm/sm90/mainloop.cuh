// Mainloop policies of GEMMs with ragged rows: how a consumer warpgroup accumulates its 64 x 256 tile over K,
// for each operand format.
//
// A policy defines
//   Element, Out, SharedStorage  types;
//   kBMnMajor                    B is [G, k, n], otherwise [G, n, k];
//   kGroupScales, kRowScales     scales that scale_and_add_bias applies (grouped_gemm.cuh);
//   ScaleMaps                    tensor maps of the scales that are loaded with the stages;
//   mma<half_count>()            reads `steps` stages and adds the products of `half_count` halves of the
//                                tile's columns to acc.
//
// wgmma_wait() does not name the accumulators (there is no warpgroup_fence_operand as in CUTLASS). WGMMAs and
// waits are volatile, so they keep their order. ptxas knows which registers WGMMAs in flight write: it does
// not move reads of them above the wait, or it makes the WGMMAs synchronous and reports that (warning C7510).
#pragma once

#include "common/ptx/mbarrier.cuh"
#include "common/ptx/memory.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "gemm/sm90/params.cuh"
#include "gemm/sm90/pipeline.cuh"
#include "gemm/sm90/tensor_map.h"

namespace transformer_plugin::gemm::sm90 {

// No scales are loaded with the stages.
struct NoScaleMaps {
  static constexpr uint32_t kBytes = 0;
  static NoScaleMaps make(const GroupedGemmArgs&) { return {}; }
  template <typename SharedStorage>
  __device__ __forceinline__ void load_stage(SharedStorage&, const PipelineState<SharedStorage>&, int, int,
                                             int, int) const {}
};

// BF16 or FP16 operands. The WGMMAs of a stage start before those of the previous stage have finished.
// `copied`: cp.async copies an operand (gather/).
template <typename T, bool b_mn_major, typename SharedStorageType = SharedStorageNoScales,
          bool copied = false>
struct Mainloop16Bit {
  using Element = T;
  using Out = T;
  using SharedStorage = SharedStorageType;
  using ScaleMaps = NoScaleMaps;
  static constexpr bool kBMnMajor = b_mn_major;
  static constexpr bool kGroupScales = false, kRowScales = false;

  template <int half_count>
  static __device__ __forceinline__ void mma(const GroupedGemmParams&, SharedStorage& shared,
                                             PipelineState<SharedStorage>& state, int steps,
                                             const WarpgroupTile& wg_tile, float (&acc)[kAccumulators]) {
    int previous = -1;  // stage that the WGMMAs of the previous step read
    for (int step = 0; step < steps; ++step, state.advance()) {
      mbarrier_wait(&shared.full[state.stage], state.phase);
      if constexpr (copied) fence_proxy_async();
      const Stage& stage = shared.stages[state.stage];
      const uint64_t a = smem_desc_k_major(stage.a[wg_tile.consumer]);
      // K-major: the boxes of B are contiguous, so they are one operand of 256 rows.
      const uint64_t b = b_mn_major ? smem_desc_mn_major(stage.b, kBoxBytes) : smem_desc_k_major(stage.b);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTileK<T> / kWgmmaK; ++i) {
        wgmma<T, false, b_mn_major, half_count>(acc, a + i * kKMajorDescStep,
                                                b + i * (b_mn_major ? kMnMajorDescStep : kKMajorDescStep));
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (previous >= 0) consumer_release(&shared.empty[previous]);
      previous = state.stage;
    }
    wgmma_wait<0>();
    consumer_release(&shared.empty[previous]);
  }
};

template <typename T, bool b_mn_major>
using GatherMainloop16Bit = Mainloop16Bit<T, b_mn_major, SharedStorageNoScales, true>;

// E4M3 operands, with FP32 scales of 1x128 blocks of A and of 128x128 blocks of B. Tensor cores accumulate
// FP8 products with about 14 bits, so the sum of each 128 of K is promoted: scaled and added to FP32
// accumulators by FMA. Scales are loaded by TMA together with the stage, which is faster than loads by the
// consumers.
struct MainloopFp8Block {
  using Element = uint8_t;
  using Out = __nv_bfloat16;
  using SharedStorage = SharedStorageFp8Block;
  static constexpr bool kBMnMajor = false;
  static constexpr bool kGroupScales = false, kRowScales = false;
  static constexpr int kBlock = 128;
  static_assert(kTileK<Element> == kBlock && kTileColumns == 2 * kBlock,
                "a stage is one K block, half a tile one column block");

  // A TMA box begins at a multiple of 16 bytes (tensor_map.h): the scales of A at a multiple of 4 rows, those
  // of B at a multiple of 4 steps.
  struct ScaleMaps {
    using Scales = BlockScaleStages<SharedStorage::kStages>;
    static constexpr uint32_t kBytes = Scales::kBytes;
    CUtensorMap a_scale, b_scale;  // [ceil(k/128), up4(T)] and [G, ceil(n/128), up4(ceil(k/128))] (config.h)

    static ScaleMaps make(const GroupedGemmArgs& args) {
      const auto divide_up = [](int64_t size, int64_t by) { return (size + by - 1) / by; };
      const int64_t steps = divide_up(args.k, kBlock), blocks_n = divide_up(args.n, kBlock);
      return {
          scale_map({args.a_scale, 1, steps, divide_up(args.rows, 4) * 4}, 1, Scales::kRows),
          scale_map({args.b_scale, args.groups, blocks_n, divide_up(steps, 4) * 4}, 2, Scales::kSteps),
      };
    }
    // Loads the scales of one step of the tile whose first row and column are given.
    __device__ __forceinline__ void load_stage(SharedStorage& shared,
                                               const PipelineState<SharedStorage>& state, int group, int row,
                                               int column, int step) const {
      uint64_t* full = &shared.full[state.stage];
      tma_load(shared.stage_data.a_scales(state.stage), a_scale, full, row / 4 * 4, step, 0);
      tma_load(shared.stage_data.b_scales(state.stage), b_scale, full, step / 4 * 4, column / kBlock, group);
    }
  };

  template <int half_count>
  static __device__ __forceinline__ void mma(const GroupedGemmParams&, SharedStorage& shared,
                                             PipelineState<SharedStorage>& state, int steps,
                                             const WarpgroupTile& wg_tile, float (&acc)[kAccumulators]) {
    const int zero = per_thread_zero();
    // Index of the thread's first row in the loaded scales. The second term is the offset of the tile's first
    // row in them.
    const int row0 =
        thread_row(wg_tile.consumer * kBoxRows) + (wg_tile.row - wg_tile.consumer * kBoxRows) % 4;
    for (int step = 0; step < steps; ++step, state.advance()) {
      mbarrier_wait(&shared.full[state.stage], state.phase);
      const Stage& stage = shared.stages[state.stage];
      const float* a_scales = shared.stage_data.a_scales(state.stage);
      const auto& b_scales = shared.stage_data.b_scales(state.stage);
      const float a_scale0 = a_scales[row0], a_scale1 = a_scales[row0 + 8];
      const uint64_t a = smem_desc_k_major(stage.a[wg_tile.consumer]), b = smem_desc_k_major(stage.b);
#pragma unroll
      for (int half = 0; half < half_count; ++half) {  // a half is one block of 128 columns
        const float b_scale = b_scales[half][step % 4 + zero];
        const float row_scale[2] = {a_scale0 * b_scale, a_scale1 * b_scale};
        float partial[kAccumulators / 2];
        wgmma_fp8_stage<DType::kFloat8E4M3>(partial, a, b, half);
        // No __syncwarp: all lanes read the scales before the WGMMA, for which the warp converges.
        if (half == half_count - 1) consumer_release(&shared.empty[state.stage]);
        float* half_acc = acc + half * (kAccumulators / 2);
#pragma unroll
        for (int i = 0; i < kAccumulators / 2; ++i) {
          half_acc[i] = fmaf(partial[i], row_scale[i / 2 % 2], half_acc[i]);
        }
      }
    }
  }
};

// FP8 operands with one scale for each group (kGroup; the fp8_tensor format): A is E4M3 or E5M2, B is E4M3.
// The epilogue applies the scales, as one factor. The sum of each 128 of K is still promoted to FP32, because
// of the tensor cores' precision.
template <DType a_type>
struct MainloopFp8Tensor {
  using Element = uint8_t;
  using Out = __nv_bfloat16;
  using SharedStorage = SharedStorageNoScales;
  using ScaleMaps = NoScaleMaps;
  static constexpr bool kBMnMajor = false;
  static constexpr bool kGroupScales = true, kRowScales = false;

  template <int half_count>
  static __device__ __forceinline__ void mma(const GroupedGemmParams&, SharedStorage& shared,
                                             PipelineState<SharedStorage>& state, int steps,
                                             const WarpgroupTile& wg_tile, float (&acc)[kAccumulators]) {
    for (int step = 0; step < steps; ++step, state.advance()) {
      mbarrier_wait(&shared.full[state.stage], state.phase);
      const Stage& stage = shared.stages[state.stage];
      accumulate_fp8_stage<a_type, half_count>(acc, smem_desc_k_major(stage.a[wg_tile.consumer]),
                                               smem_desc_k_major(stage.b),
                                               [&] { consumer_release(&shared.empty[state.stage]); });
    }
  }
};

// The same with one scale for each row of A and each row of B [G, n, k], which the epilogue applies.
template <DType a_type>
struct MainloopFp8Row : MainloopFp8Tensor<a_type> {
  static constexpr bool kGroupScales = false, kRowScales = true;
};

}  // namespace transformer_plugin::gemm::sm90
