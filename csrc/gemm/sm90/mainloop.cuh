// Mainloop policies of GEMMs with ragged rows: how a consumer warpgroup accumulates its 64 x 256 tile over K,
// for each operand format.
//
// A policy defines the types Element, Out and SharedStorage; kBMnMajor (B is [G, k, n], otherwise [G, n, k]);
// the granularity of scales that the epilogue applies (kGroupScales, kRowScales); ScaleMaps, the tensor maps
// of scales that are loaded with the stages; and mma<n_halves>(), which reads `steps` stages and adds the
// products of `n_halves` halves of the tile's columns to acc.
#pragma once

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
template <typename T, bool b_mn_major, typename SharedStorageType = SharedStorageDefault>
struct Mainloop16Bit {
  using Element = T;
  using Out = T;
  using SharedStorage = SharedStorageType;
  using ScaleMaps = NoScaleMaps;
  static constexpr bool kBMnMajor = b_mn_major;
  static constexpr bool kGroupScales = false, kRowScales = false;

  template <int n_halves>
  static __device__ __forceinline__ void mma(const GroupedGemmParams&, SharedStorage& shared,
                                             PipelineState<SharedStorage>& state, int steps,
                                             const WarpgroupTile& wg_tile, float (&acc)[kAccumulators]) {
    int previous = -1;  // stage that the WGMMAs of the previous step read
    for (int step = 0; step < steps; ++step, state.advance()) {
      mbarrier_wait(&shared.full[state.stage], state.phase);
      const Stage& stage = shared.stages[state.stage];
      const uint64_t a = smem_desc_k_major(stage.a[wg_tile.consumer]);
      const uint64_t b = b_mn_major ? smem_desc_mn_major(stage.b, kBoxBytes) : smem_desc_k_major(stage.b);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kTileK<T> / kWgmmaK; ++i) {  // K = 16: 32 bytes of a row, or 16 rows if MN-major
        wgmma<T, false, b_mn_major, n_halves>(acc, a + i * 2, b + i * (b_mn_major ? kSwizzleBytes : 2));
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

// E4M3 operands, with FP32 scales of 1x128 blocks of A and of 128x128 blocks of B. Tensor cores accumulate
// FP8 products with about 14 bits, so the sum of each 128 of K is scaled and added to acc in FP32 outside of
// them. Scales are loaded by TMA together with the stage, which is faster than loads by the consumers.
struct MainloopFp8Block {
  using Element = uint8_t;
  using Out = __nv_bfloat16;
  using SharedStorage = SharedStorageFp8Block;
  static constexpr bool kBMnMajor = false;
  static constexpr bool kGroupScales = false, kRowScales = false;
  static constexpr int kBlock = 128;
  static_assert(kTileK<Element> == kBlock && kTileColumns == 2 * kBlock, "a stage is one block of K");

  // TMA boxes begin at multiples of 16 bytes: the scales of A at a multiple of 4 rows, those of B at a
  // multiple of 4 steps.
  struct ScaleMaps {
    using Scales = BlockScaleStages<SharedStorage::kStages>;
    static constexpr uint32_t kBytes = Scales::kBytes;
    CUtensorMap rows, columns;  // [ceil(k / 128), rows] and [groups, ceil(n / 128), ceil(k / 128)]

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
      tma_load(shared.stage_data.rows(state.stage), rows, full, row / 4 * 4, step, 0);
      tma_load(shared.stage_data.columns(state.stage), columns, full, step / 4 * 4, column / kBlock, group);
    }
  };

  template <int n_halves>
  static __device__ __forceinline__ void mma(const GroupedGemmParams&, SharedStorage& shared,
                                             PipelineState<SharedStorage>& state, int steps,
                                             const WarpgroupTile& wg_tile, float (&acc)[kAccumulators]) {
    const int lane = threadIdx.x % kWarpSize, zero = per_thread_zero();
    const int tile_row =
        wg_tile.consumer * kBoxRows + threadIdx.x % kWarpgroupSize / kWarpSize * 16 + lane / 4;
    // Index of the thread's first row in the loaded scales; its other row is 8 further.
    const int low = tile_row + (wg_tile.row - wg_tile.consumer * kBoxRows) % 4;
    for (int step = 0; step < steps; ++step, state.advance()) {
      mbarrier_wait(&shared.full[state.stage], state.phase);
      const Stage& stage = shared.stages[state.stage];
      const float* rows = shared.stage_data.rows(state.stage);
      const auto& columns = shared.stage_data.columns(state.stage);
      const float scale_low = rows[low], scale_high = rows[low + 8];
      const uint64_t a = smem_desc_k_major(stage.a[wg_tile.consumer]), b = smem_desc_k_major(stage.b);
#pragma unroll
      for (int half = 0; half < n_halves; ++half) {  // a half is one block of 128 columns
        const float scale = columns[half][step % 4 + zero];
        const float both[2] = {scale_low * scale, scale_high * scale};
        float partial[64];
        wgmma_fp8_stage<DType::kFloat8E4M3>(partial, a, b, half);
        if (half == n_halves - 1) consumer_release(&shared.empty[state.stage]);
#pragma unroll
        for (int i = 0; i < 64; ++i) {
          acc[half * 64 + i] = fmaf(partial[i], both[i / 2 % 2], acc[half * 64 + i]);
        }
      }
    }
  }
};

// FP8 operands with one scale for each group: A is E4M3 or E5M2, B is E4M3. The epilogue applies the scales,
// as one factor. The sum of each 128 of K still leaves the tensor cores, because of their precision.
template <DType a_type>
struct MainloopFp8Tensor {
  using Element = uint8_t;
  using Out = __nv_bfloat16;
  using SharedStorage = SharedStorageDefault;
  using ScaleMaps = NoScaleMaps;
  static constexpr bool kBMnMajor = false;
  static constexpr bool kGroupScales = true, kRowScales = false;

  template <int n_halves>
  static __device__ __forceinline__ void mma(const GroupedGemmParams&, SharedStorage& shared,
                                             PipelineState<SharedStorage>& state, int steps,
                                             const WarpgroupTile& wg_tile, float (&acc)[kAccumulators]) {
    for (int step = 0; step < steps; ++step, state.advance()) {
      mbarrier_wait(&shared.full[state.stage], state.phase);
      const Stage& stage = shared.stages[state.stage];
      accumulate_fp8_stage<a_type, n_halves>(acc, smem_desc_k_major(stage.a[wg_tile.consumer]),
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
