// Mainloop policies of weight gradients: how the producer loads a stage, and how a consumer warpgroup
// accumulates its 64 x 256 tile over the tokens of a group, for each operand format.
//
// K of these GEMMs is the token dimension T. A policy defines
//   SharedStorage     type;
//   kTokensPerStage   K of a stage;
//   kGroupScales      one scale for each group, which the epilogue applies;
//   kBlockScales      scales of blocks of kTokensPerStage tokens, which are loaded with the stages;
//   kPublishesTiles   the producer publishes a TileInfo with each tile; otherwise all warps run the
//                     scheduler. Publishing is faster with 16-bit operands. With FP8 it is slower, because
//                     the compiler then moves shared memory addresses out of uniform registers in each step;
//   encode()          the tensor maps;
//   load_stage()      producer: loads the tokens from `token` on, of a group with tokens `tokens`.
//                     `token_block`: their index in block scales (TokenBlocks);
//   mma()             consumer: accumulates `token_count` tokens.
#pragma once

#include <tuple>

#include "common/ptx/barrier.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/memory.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "gemm/sm90/align_groups.h"
#include "gemm/sm90/pipeline.cuh"
#include "gemm/sm90/tensor_map.h"
#include "gemm/sm90/wgrad/params.cuh"

namespace transformer_plugin::gemm::sm90 {

// Counts token blocks. The tokens of each group are divided into blocks of `block_tokens`; scales are stored
// block by block, those of a group after those of the groups before it.
template <int block_tokens>
class TokenBlocks {
 public:
  // Blocks of the groups before `group`, which must not decrease between calls.
  __device__ __forceinline__ int before(const int32_t* offsets, int group) {
#pragma unroll 1
    for (; group_ < group; ++group_) {
      blocks_ += (offsets[group_ + 1] - offsets[group_] + block_tokens - 1) / block_tokens;
    }
    return blocks_;
  }

 private:
  int group_ = 0, blocks_ = 0;
};

__device__ __forceinline__ int round_up(int size, int to) { return (size + to - 1) / to * to; }

// Starts the WGMMAs of a stage: issue(i) for i < count. A full stage is unrolled without branches; the last
// stage of a group, which may need fewer, is a loop. Each block of the loop is its own group of WGMMAs, so
// wgmma_wait<1> leaves at most one block in flight.
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
  named_barrier_sync(kBarrierOfBothConsumers, kConsumerWarpgroups * kWarpgroupSize);
}

// BF16 or FP16 operands grad [T, m] and input [T, n], both MN-major. `copied`: cp.async copies grad (gather/).
template <typename T, bool copied = false>
struct WgradMainloop16Bit {
  using SharedStorage = SharedStorageNoScales;
  static constexpr int kTokensPerStage = kBoxRows;
  static_assert(kTokensPerStage == kTileK<T>, "a box of an MN-major operand is the K of one stage");
  static constexpr bool kGroupScales = false, kBlockScales = false;
  static constexpr bool kPublishesTiles = true;

  static void encode(WgradTensorMaps& maps, const GroupedGemmArgs& args) {
    const auto map = [&](const void* data, int64_t columns) {
      return tensor_map({.data = data,
                         .dtype = args.dtype,
                         .columns = columns,
                         .rows = args.rows,
                         .count = 1,
                         .row_stride = columns,
                         .matrix_stride = args.rows * columns},
                        kTokensPerStage);
    };
    if constexpr (!copied) maps.grad = map(args.a, args.m);  // otherwise unused, and not prefetched
    maps.input = map(args.b, args.n);
  }

  static __device__ __forceinline__ void load_stage(const WgradTensorMaps& maps, const WgradParams&,
                                                    SharedStorage& shared,
                                                    const PipelineState<SharedStorage>& state, int cta_rank,
                                                    const CtaTile& tile, const GroupTokens&, int token, int) {
    producer_load(
        shared, state, cta_rank, tile.shares_b,
        [&](void* to, int box, uint64_t* barrier, bool multicast) {
          tma_load_or_multicast(multicast, to, maps.grad, barrier, tile.tile_row * kTileRows + box * kBoxRows,
                                token, 0);
        },
        [&](void* to, int box, uint64_t* barrier, bool multicast) {
          tma_load_or_multicast(multicast, to, maps.input, barrier,
                                tile.tile_column * kTileColumns + box * kBoxRows, token, 0);
        });
  }

  // Zeroes the tokens of a stage that are past the end of the group, as far as WGMMAs read them: they belong
  // to the next group and may contain NaN. The group has `remaining` tokens in this stage. Called by all
  // threads of both consumers, and contains a barrier of both.
  static __device__ __forceinline__ void zero_tokens_past_group(Stage& stage, int remaining) {
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

  // A group without tokens has one stage and no WGMMAs.
  static __device__ __forceinline__ void mma(SharedStorage& shared, PipelineState<SharedStorage>& state,
                                             int token_count, int consumer, float (&acc)[kAccumulators]) {
    int remaining = token_count, previous = -1;  // previous: stage that the WGMMAs of the previous step read
    do {
      mbarrier_wait(&shared.full[state.stage], state.phase);
      if constexpr (copied) fence_proxy_async();
      Stage& stage = shared.stages[state.stage];
      if (remaining < kTokensPerStage) zero_tokens_past_group(stage, remaining);
      const uint64_t a = smem_desc_mn_major(stage.a[consumer], kBoxBytes),
                     b = smem_desc_mn_major(stage.b, kBoxBytes);
      wgmma_k_blocks<kTokensPerStage / kWgmmaK>((remaining + kWgmmaK - 1) / kWgmmaK, [&](int i) {
        wgmma<T, true, true>(acc, a + i * kMnMajorDescStep, b + i * kMnMajorDescStep);
      });
      wgmma_wait<1>();
      if (previous >= 0) consumer_release(&shared.empty[previous]);
      previous = state.stage;
      remaining -= kTokensPerStage;
      state.advance();
    } while (remaining > 0);
    wgmma_wait<0>();
    consumer_release(&shared.empty[previous]);
  }
};

// What both FP8 policies share. Operands are grad [m, T] and input [n, T], both K-major. A TMA box begins at
// a multiple of 16 bytes (tensor_map.h), a group at any token: groups that begin elsewhere are read from the
// operands in the `aligned` layout (align_groups.h).
struct WgradFp8Operands {
  static constexpr int kTokensPerStage = kSwizzleBytes;
  static constexpr bool kPublishesTiles = false;

  static void encode(WgradTensorMaps& maps, const GroupedGemmArgs& args) {
    const auto map = [&](const void* data, int64_t row_length, int64_t row_count) {
      return tensor_map({.data = data,
                         .dtype = args.dtype,
                         .columns = row_length,
                         .rows = row_count,
                         .count = 1,
                         .row_stride = row_length,
                         .matrix_stride = row_length * row_count},
                        kBoxRows);
    };
    if (!args.read_all_group_aligned) {
      maps.grad = map(args.a, args.rows, args.m);
      maps.input = map(args.b, args.rows, args.n);
    }
    if (args.a_group_aligned) {
      const int64_t row_length = quantize::aligned_length(args.rows, args.groups);
      maps.grad_group_aligned = map(args.a_group_aligned, row_length, args.m);
      maps.input_group_aligned = map(args.b_group_aligned, row_length, args.n);
      if (args.read_all_group_aligned) {  // prefetch_tensormap needs valid maps
        std::tie(maps.grad, maps.input) = std::tie(maps.grad_group_aligned, maps.input_group_aligned);
      }
    }
  }

  // Loads the operands of a stage. `extra_bytes` as in producer_load.
  template <typename SharedStorage>
  static __device__ __forceinline__ void load_operands(const WgradTensorMaps& maps, const WgradParams& args,
                                                       SharedStorage& shared,
                                                       const PipelineState<SharedStorage>& state,
                                                       int cta_rank, const CtaTile& tile,
                                                       const GroupTokens& tokens, int token,
                                                       uint32_t extra_bytes) {
    const bool group_aligned = reads_group_aligned(tokens.begin, args.read_all_group_aligned);
    const CUtensorMap& grad = group_aligned ? maps.grad_group_aligned : maps.grad;
    const CUtensorMap& input = group_aligned ? maps.input_group_aligned : maps.input;
    const int begin =
        group_aligned ? static_cast<int>(quantize::aligned_begin(tokens.begin, tile.group)) : tokens.begin;
    const int k = begin + token - tokens.begin;
    const int a_row = tile.tile_row * kTileRows, b_row = tile.tile_column * kTileColumns;
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

  // Zeroes the tokens (K elements) of a stage that are past the end of the group. Called by all threads of
  // both consumers, and contains a barrier of both. All WGMMAs of the stage are executed: with FP8 a variable
  // count makes those of full stages slower (with 16-bit operands it does not, hence wgmma_k_blocks there).
  static __device__ __forceinline__ void zero_tokens_past_group(Stage& stage, int remaining) {
    constexpr int kOperandRows = (kABoxes + kBBoxes) * kBoxRows;
    for (int i = static_cast<int>(threadIdx.x) - kWarpgroupSize; i < kOperandRows;
         i += kConsumerWarpgroups * kWarpgroupSize) {
      const int box_index = i / kBoxRows, box_row = i % kBoxRows;
      uint8_t* box = box_index < kABoxes ? stage.a[box_index] : stage.b[box_index - kABoxes];
      int chunk = remaining / 16;
      if (remaining % 16 != 0) {
        uint8_t* end = swizzled(box, box_row, chunk++);
        for (int byte = remaining % 16; byte < 16; ++byte) end[byte] = 0;
      }
      for (; chunk < kSwizzleBytes / 16; ++chunk) {
        *reinterpret_cast<uint4*>(swizzled(box, box_row, chunk)) = uint4{};
      }
    }
    fence_and_sync_consumers();
  }
};

// E4M3 operands with FP32 scales of 1x128 blocks, which begin anew in each group. As in MainloopFp8Block, the
// sum of each 128 tokens is promoted: scaled and added to FP32 accumulators by FMA. The scales of all rows of
// both operands are loaded with the stage.
template <typename Out>
struct WgradMainloopFp8Block : WgradFp8Operands {
  using SharedStorage = SharedStorageWgradFp8Block<Out>;
  static constexpr bool kGroupScales = false, kBlockScales = true;
  static_assert(kTokensPerStage == quantize::kTile, "a stage is one block of K");
  // Pairs of B scales that are read ahead of their use, the first of them while WGMMAs run. More would need
  // more registers.
  static constexpr int kScalesAhead = 4;

  static void encode(WgradTensorMaps& maps, const GroupedGemmArgs& args) {
    WgradFp8Operands::encode(maps, args);
    const auto map = [&](const void* scales, int64_t operand_rows, int box_columns) {
      const int64_t token_blocks = quantize::Layout::row_tiles(args.rows, args.groups);
      return scale_map({scales, 1, token_blocks, ceil_div(operand_rows, 4) * 4}, 1, box_columns);
    };
    maps.grad_scale = map(args.a_scale, args.m, kTileRows);
    maps.input_scale = map(args.b_scale, args.n, kTileColumns);
  }

  static __device__ __forceinline__ void load_stage(const WgradTensorMaps& maps, const WgradParams& args,
                                                    SharedStorage& shared,
                                                    const PipelineState<SharedStorage>& state, int cta_rank,
                                                    const CtaTile& tile, const GroupTokens& tokens, int token,
                                                    int token_block) {
    WgradBlockScales& scales = shared.stage_data[state.stage];
    load_operands(maps, args, shared, state, cta_rank, tile, tokens, token, sizeof(scales));
    uint64_t* full = &shared.full[state.stage];
    tma_load(scales.a, maps.grad_scale, full, tile.tile_row * kTileRows, token_block, 0);
    tma_load(scales.b, maps.input_scale, full, tile.tile_column * kTileColumns, token_block, 0);
  }

  static __device__ __forceinline__ void mma(SharedStorage& shared, PipelineState<SharedStorage>& state,
                                             int token_count, int consumer, float (&acc)[kAccumulators]) {
    const int lane = threadIdx.x % kWarpSize;
    const int row0 = thread_row(consumer * kBoxRows, lane);
    constexpr int kHalfColumns = kTileColumns / 2, kColumnGroups = kHalfColumns / 8;
    for (int remaining = token_count; remaining > 0; remaining -= kTokensPerStage, state.advance()) {
      mbarrier_wait(&shared.full[state.stage], state.phase);
      Stage& stage = shared.stages[state.stage];
      const WgradBlockScales& scales = shared.stage_data[state.stage];
      if (remaining < kTokensPerStage) zero_tokens_past_group(stage, remaining);
      const uint64_t a = smem_desc_k_major(stage.a[consumer]), b = smem_desc_k_major(stage.b);
      const float a_scale0 = scales.a[row0], a_scale1 = scales.a[row0 + 8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* b_scales = &scales.b[half * kHalfColumns + lane % 4 * 2];
        const auto b_scale = [&](int j) { return *reinterpret_cast<const float2*>(b_scales + j * 8); };
        float2 ahead[kScalesAhead];
#pragma unroll
        for (int j = 0; j < kScalesAhead; ++j) ahead[j] = b_scale(j);
        float partial[kAccumulators / 2];
        wgmma_fp8_stage<DType::kFloat8E4M3>(partial, a, b, half);
        float* sums = &acc[half * (kAccumulators / 2)];
#pragma unroll
        for (int j = 0; j < kColumnGroups; ++j) {
          const float2 scale = ahead[j % kScalesAhead];
          if (j + kScalesAhead < kColumnGroups) ahead[j % kScalesAhead] = b_scale(j + kScalesAhead);
          sums[j * 4] = fmaf(partial[j * 4], a_scale0 * scale.x, sums[j * 4]);
          sums[j * 4 + 1] = fmaf(partial[j * 4 + 1], a_scale0 * scale.y, sums[j * 4 + 1]);
          sums[j * 4 + 2] = fmaf(partial[j * 4 + 2], a_scale1 * scale.x, sums[j * 4 + 2]);
          sums[j * 4 + 3] = fmaf(partial[j * 4 + 3], a_scale1 * scale.y, sums[j * 4 + 3]);
        }
      }
      __syncwarp();  // all lanes have read the scales, some of them after the last WGMMA
      consumer_release(&shared.empty[state.stage]);
    }
  }
};

// FP8 operands with one scale for each group, which the epilogue applies: grad is E4M3 or E5M2, input is
// E4M3.
template <DType grad_type>
struct WgradMainloopFp8Tensor : WgradFp8Operands {
  using SharedStorage = SharedStorageWgradFp8Tensor;
  static constexpr bool kGroupScales = true, kBlockScales = false;

  static __device__ __forceinline__ void load_stage(const WgradTensorMaps& maps, const WgradParams& args,
                                                    SharedStorage& shared,
                                                    const PipelineState<SharedStorage>& state, int cta_rank,
                                                    const CtaTile& tile, const GroupTokens& tokens, int token,
                                                    int) {
    load_operands(maps, args, shared, state, cta_rank, tile, tokens, token, 0);
  }

  static __device__ __forceinline__ void mma(SharedStorage& shared, PipelineState<SharedStorage>& state,
                                             int token_count, int consumer, float (&acc)[kAccumulators]) {
    for (int remaining = token_count; remaining > 0; remaining -= kTokensPerStage, state.advance()) {
      mbarrier_wait(&shared.full[state.stage], state.phase);
      Stage& stage = shared.stages[state.stage];
      if (remaining < kTokensPerStage) zero_tokens_past_group(stage, remaining);
      accumulate_fp8_stage<grad_type>(acc, smem_desc_k_major(stage.a[consumer]), smem_desc_k_major(stage.b),
                                      [&] { consumer_release(&shared.empty[state.stage]); });
    }
  }
};

}  // namespace transformer_plugin::gemm::sm90
