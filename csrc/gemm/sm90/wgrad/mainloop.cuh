// Mainloop policies of weight gradients: how the producer loads a stage, and how a consumer warpgroup
// accumulates its 64 x 256 tile over the rows of a group, for each operand format.
//
// K of these GEMMs is the token dimension T. A policy defines SharedStorage; kRows, the rows (K) of a stage;
// kGroupScales; kPublishesTiles (the producer publishes a TileInfo with each tile; otherwise all warps run
// the scheduler); encode(), the tensor maps; load_stage(); and mma().
#pragma once

#include <tuple>

#include "gemm/sm90/align_groups.h"
#include "gemm/sm90/pipeline.cuh"
#include "gemm/sm90/tensor_map.h"
#include "gemm/sm90/wgrad/params.cuh"

namespace transformer_plugin::gemm::sm90 {

// Counts row tiles. The rows of each group are divided into tiles of kRows; scales are stored row tile by row
// tile, those of a group after those of the groups before it.
template <int kRows>
class ScaleRowTiles {
 public:
  // Row tiles of the groups before `group`, which must not decrease between calls.
  __device__ __forceinline__ int before(const int32_t* offsets, int group) {
#pragma unroll 1
    for (; group_ < group; ++group_) tiles_ += (offsets[group_ + 1] - offsets[group_] + kRows - 1) / kRows;
    return tiles_;
  }

 private:
  int group_ = 0, tiles_ = 0;
};

__device__ __forceinline__ int round_up(int size, int to) { return (size + to - 1) / to * to; }

// Starts the WGMMAs of a stage: issue(i) for i < count. A full stage is unrolled without branches; the last
// stage of a group, which may need fewer, is a loop.
template <int max_count, typename Issue>
__device__ __forceinline__ void wgmma_k_blocks(int count, Issue issue) {
  if (count >= max_count) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < max_count; ++i) issue(i);
    wgmma_commit();
    return;
  }
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    wgmma_fence();
    issue(i);
    wgmma_commit();
  }
}

// The consumers have written to a stage: makes that visible to WGMMA of both warpgroups.
__device__ __forceinline__ void fence_and_sync_consumers() {
  fence_proxy_async();
  named_barrier_sync(1 + kConsumerWarpgroups, kConsumerWarpgroups * kWarpgroupSize);
}

// BF16 or FP16 operands grad [T, m] and input [T, n], both MN-major.
template <typename T>
struct WgradMainloop16Bit {
  using SharedStorage = SharedStorageDefault;
  static constexpr int kRows = kBoxRows;
  static constexpr bool kGroupScales = false;
  static constexpr bool kPublishesTiles = true;

  static void encode(WgradTensorMaps& maps, const GroupedGemmArgs& args) {
    const auto map = [&](const void* data, int64_t columns) {
      return tensor_map({data, args.dtype, columns, args.rows, 1, columns, args.rows * columns}, kRows);
    };
    maps.grad = map(args.a, args.m);
    maps.input = map(args.b, args.n);
  }

  static __device__ __forceinline__ void load_stage(const WgradTensorMaps& maps, const WgradParams&,
                                                    SharedStorage& shared,
                                                    const PipelineState<SharedStorage>& state, int cta_rank,
                                                    const CtaTile& tile, const GroupRows&, int row) {
    producer_load(
        shared, state, cta_rank, tile.shares_b,
        [&](void* to, int box, uint64_t* barrier, bool multicast) {
          tma_load_or_multicast(multicast, to, maps.grad, barrier, tile.row * kTileRows + box * kBoxRows, row,
                                0);
        },
        [&](void* to, int box, uint64_t* barrier, bool multicast) {
          tma_load_or_multicast(multicast, to, maps.input, barrier,
                                tile.column * kTileColumns + box * kBoxRows, row, 0);
        });
  }

  // Zeroes the rows of a stage that are past the end of the group, as far as WGMMAs read them: they belong to
  // the next group and may contain NaN. Called by all consumers; the group has `remaining` rows in this
  // stage.
  static __device__ __forceinline__ void zero_rows(Stage& stage, int remaining) {
    const int chunks = (round_up(remaining, kWgmmaK) - remaining) * (kSwizzleBytes / 16);  // of a box
    constexpr int kBoxes = kABoxes + kBBoxes;
    for (int i = static_cast<int>(threadIdx.x) - kWarpgroupSize; i < chunks * kBoxes;
         i += kConsumerWarpgroups * kWarpgroupSize) {
      const int box = i / chunks;
      uint8_t* to = box < kABoxes ? stage.a[box] : stage.b[box - kABoxes];
      *reinterpret_cast<uint4*>(to + remaining * kSwizzleBytes + i % chunks * 16) = uint4{};
    }
    fence_and_sync_consumers();
  }

  // Accumulates `remaining` rows. A group without rows has one stage and no WGMMAs.
  static __device__ __forceinline__ void mma(SharedStorage& shared, PipelineState<SharedStorage>& state,
                                             int remaining, int consumer, float (&acc)[kAccumulators]) {
    int previous = -1;  // stage that the WGMMAs of the previous step read
    do {
      mbarrier_wait(&shared.full[state.stage], state.phase);
      Stage& stage = shared.stages[state.stage];
      if (remaining < kRows) zero_rows(stage, remaining);
      const uint64_t a = smem_desc_mn_major(stage.a[consumer], kBoxBytes),
                     b = smem_desc_mn_major(stage.b, kBoxBytes);
      wgmma_k_blocks<kRows / kWgmmaK>((remaining + kWgmmaK - 1) / kWgmmaK, [&](int i) {
        wgmma<T, true, true>(acc, a + i * kSwizzleBytes, b + i * kSwizzleBytes);  // 16 rows of 128 bytes
      });
      wgmma_wait<1>();
      if (previous >= 0) consumer_release(&shared.empty[previous]);
      previous = state.stage;
      remaining -= kRows;
      state.advance();
    } while (remaining > 0);
    wgmma_wait<0>();
    consumer_release(&shared.empty[previous]);
  }
};

// What both FP8 policies share. Operands are grad [m, T] and input [n, T], both K-major. TMA boxes begin at
// multiples of 16 bytes, groups anywhere: groups that begin elsewhere are read from realigned copies
// (align_groups.h).
struct WgradFp8Operands {
  static constexpr int kRows = kSwizzleBytes;
  static constexpr bool kPublishesTiles = false;

  static void encode(WgradTensorMaps& maps, const GroupedGemmArgs& args) {
    const auto map = [&](const void* data, int64_t length, int64_t rows) {
      return tensor_map({data, args.dtype, length, rows, 1, length, length * rows}, kBoxRows);
    };
    if (!args.all_realigned) {
      maps.grad = map(args.a, args.rows, args.m);
      maps.input = map(args.b, args.rows, args.n);
    }
    if (args.a_realigned) {
      const int64_t length = quantize::aligned_length(args.rows, args.groups);
      maps.grad_realigned = map(args.a_realigned, length, args.m);
      maps.input_realigned = map(args.b_realigned, length, args.n);
      if (args.all_realigned) {
        std::tie(maps.grad, maps.input) = std::tie(maps.grad_realigned, maps.input_realigned);
      }
    }
  }

  // Loads the operands of a stage. `extra_bytes` as in producer_load.
  template <typename SharedStorage>
  static __device__ __forceinline__ void load_operands(const WgradTensorMaps& maps, const WgradParams& args,
                                                       SharedStorage& shared,
                                                       const PipelineState<SharedStorage>& state,
                                                       int cta_rank, const CtaTile& tile,
                                                       const GroupRows& rows, int row, uint32_t extra_bytes) {
    const bool realigned = is_realigned(rows.begin, args.all_realigned);
    const CUtensorMap& grad = realigned ? maps.grad_realigned : maps.grad;
    const CUtensorMap& input = realigned ? maps.input_realigned : maps.input;
    const int begin =
        realigned ? static_cast<int>(quantize::aligned_begin(rows.begin, tile.group)) : rows.begin;
    const int k = begin + row - rows.begin;
    const int a_row = tile.row * kTileRows, b_row = tile.column * kTileColumns;
    producer_load(
        shared, state, cta_rank, tile.shares_b,
        [&](void* to, int box, uint64_t* barrier, bool multicast) {
          tma_load_or_multicast(multicast, to, grad, barrier, k, a_row + box * kBoxRows, 0);
        },
        [&](void* to, int box, uint64_t* barrier, bool multicast) {
          tma_load_or_multicast(multicast, to, input, barrier, k, b_row + box * kBoxRows, 0);
        },
        extra_bytes);
  }

  // Zeroes the K elements of a stage that are past the end of the group. Called by all consumers. All WGMMAs
  // of the stage are executed: skipping those of zeros would slow down the others.
  static __device__ __forceinline__ void zero_rows(Stage& stage, int remaining) {
    constexpr int kOperandRows = (kABoxes + kBBoxes) * kBoxRows;
    for (int i = static_cast<int>(threadIdx.x) - kWarpgroupSize; i < kOperandRows;
         i += kConsumerWarpgroups * kWarpgroupSize) {
      const int box = i / kBoxRows, row = i % kBoxRows;
      uint8_t* rows = box < kABoxes ? stage.a[box] : stage.b[box - kABoxes];
      int chunk = remaining / 16;
      if (remaining % 16 != 0) {
        uint8_t* end = swizzled(rows, row, chunk++);
        for (int byte = remaining % 16; byte < 16; ++byte) end[byte] = 0;
      }
      for (; chunk < kSwizzleBytes / 16; ++chunk) {
        *reinterpret_cast<uint4*>(swizzled(rows, row, chunk)) = uint4{};
      }
    }
    fence_and_sync_consumers();
  }
};

// E4M3 operands with FP32 scales of 1x128 blocks, which begin anew in each group. As in MainloopFp8Block, the
// sum of each block of 128 leaves the tensor cores and is scaled in FP32. The scales of all rows of both
// operands are loaded with the stage.
template <typename Out>
struct WgradMainloopFp8Block : WgradFp8Operands {
  using SharedStorage = SharedStorageWgradFp8Block<Out>;
  static constexpr bool kGroupScales = false;
  static_assert(kRows == 128, "a stage is one block of K");
  // Pairs of B scales that are read ahead of their use, the first of them while WGMMAs run. More would need
  // more registers.
  static constexpr int kScalesAhead = 4;

  static void encode(WgradTensorMaps& maps, const GroupedGemmArgs& args) {
    WgradFp8Operands::encode(maps, args);
    const auto map = [&](const void* scales, int64_t rows, int box) {
      const int64_t row_tiles = quantize::Layout::row_tiles(args.rows, args.groups);
      return scale_map({scales, 1, row_tiles, ceil_div(rows, 4) * 4}, 1, box);
    };
    maps.grad_scale = map(args.a_scale, args.m, kTileRows);
    maps.input_scale = map(args.b_scale, args.n, kTileColumns);
  }

  static __device__ __forceinline__ void load_stage(const WgradTensorMaps& maps, const WgradParams& args,
                                                    SharedStorage& shared,
                                                    const PipelineState<SharedStorage>& state, int cta_rank,
                                                    const CtaTile& tile, const GroupRows& rows, int row) {
    WgradBlockScales& scales = shared.stage_data[state.stage];
    load_operands(maps, args, shared, state, cta_rank, tile, rows, row, sizeof(scales));
    const int row_tile = rows.first_tile + (row - rows.begin) / kRows;
    uint64_t* full = &shared.full[state.stage];
    tma_load(scales.a, maps.grad_scale, full, tile.row * kTileRows, row_tile, 0);
    tma_load(scales.b, maps.input_scale, full, tile.column * kTileColumns, row_tile, 0);
  }

  static __device__ __forceinline__ void mma(SharedStorage& shared, PipelineState<SharedStorage>& state,
                                             int remaining, int consumer, float (&acc)[kAccumulators]) {
    const int lane = threadIdx.x % kWarpSize;
    const int tile_row = consumer * kBoxRows + threadIdx.x % kWarpgroupSize / kWarpSize * 16 + lane / 4;
    for (; remaining > 0; remaining -= kRows, state.advance()) {
      mbarrier_wait(&shared.full[state.stage], state.phase);
      Stage& stage = shared.stages[state.stage];
      const WgradBlockScales& scales = shared.stage_data[state.stage];
      if (remaining < kRows) zero_rows(stage, remaining);
      const uint64_t a = smem_desc_k_major(stage.a[consumer]), b = smem_desc_k_major(stage.b);
      const float low = scales.a[tile_row], high = scales.a[tile_row + 8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* b_scales = &scales.b[half * 128 + lane % 4 * 2];
        const auto b_scale = [&](int j) { return *reinterpret_cast<const float2*>(b_scales + j * 8); };
        float2 ahead[kScalesAhead];
#pragma unroll
        for (int j = 0; j < kScalesAhead; ++j) ahead[j] = b_scale(j);
        float partial[64];
        wgmma_fp8_stage<DType::kFloat8E4M3>(partial, a, b, half);
        float* own = &acc[half * 64];
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          const float2 scale = ahead[j % kScalesAhead];
          if (j + kScalesAhead < 16) ahead[j % kScalesAhead] = b_scale(j + kScalesAhead);
          own[j * 4] = fmaf(partial[j * 4], low * scale.x, own[j * 4]);
          own[j * 4 + 1] = fmaf(partial[j * 4 + 1], low * scale.y, own[j * 4 + 1]);
          own[j * 4 + 2] = fmaf(partial[j * 4 + 2], high * scale.x, own[j * 4 + 2]);
          own[j * 4 + 3] = fmaf(partial[j * 4 + 3], high * scale.y, own[j * 4 + 3]);
        }
      }
      __syncwarp();  // all lanes have read the scales
      consumer_release(&shared.empty[state.stage]);
    }
  }
};

// FP8 operands with one scale for each group, which the epilogue applies: grad is E4M3 or E5M2, input is
// E4M3.
template <DType grad_type>
struct WgradMainloopFp8Tensor : WgradFp8Operands {
  using SharedStorage = SharedStorageWgradFp8Tensor;
  static constexpr bool kGroupScales = true;

  static __device__ __forceinline__ void load_stage(const WgradTensorMaps& maps, const WgradParams& args,
                                                    SharedStorage& shared,
                                                    const PipelineState<SharedStorage>& state, int cta_rank,
                                                    const CtaTile& tile, const GroupRows& rows, int row) {
    load_operands(maps, args, shared, state, cta_rank, tile, rows, row, 0);
  }

  static __device__ __forceinline__ void mma(SharedStorage& shared, PipelineState<SharedStorage>& state,
                                             int remaining, int consumer, float (&acc)[kAccumulators]) {
    for (; remaining > 0; remaining -= kRows, state.advance()) {
      mbarrier_wait(&shared.full[state.stage], state.phase);
      Stage& stage = shared.stages[state.stage];
      if (remaining < kRows) zero_rows(stage, remaining);
      accumulate_fp8_stage<grad_type>(acc, smem_desc_k_major(stage.a[consumer]), smem_desc_k_major(stage.b),
                                      [&] { consumer_release(&shared.empty[state.stage]); });
    }
  }
};

}  // namespace transformer_plugin::gemm::sm90
