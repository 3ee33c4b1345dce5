// Grouped GEMM of weight gradients on Hopper. For each group g:
//
//   out[g] = (sum of grad[i]^T input[i] over offsets[g] <= i < offsets[g + 1]) * alpha[g] + beta[g] * out[g]
//
// or, with `accumulate`, out[g] += (the sum) * alpha[g], in FP32, subnormals flushed to zero. FP32
// accumulation, rounded once.
//
//   grad   16-bit: [T, m], MN-major (K is T).   FP8: [m, T], K-major
//   input  16-bit: [T, n], MN-major.            FP8: [n, T], K-major
//   out    [G, m, n] in the dtype of the operands (FP8: BF16) or FP32; or a list of G matrices
//
// FP8: the caller has run launch_align_groups (gemm/dispatch/gemm_cuda.cpp) if a group may begin at
// an unaligned token.
//
// Grid: persistent, at most one CTA for each SM, in clusters of 2 CTAs; each CTA computes tiles of 128 x 256
// (tile_order.cuh). All groups have the same number of tiles, so a tile index gives group and tile by a
// division. A tile takes time in proportion to the tokens of its group, so the last wave does not follow from
// the number of tiles: there are no half-N tiles. Unequal groups need no balancing if they have many tiles,
// because the clusters take the tiles of each group in turn. Block: 3 warpgroups of 128 threads.
//   Thread 0          producer: starts all TMA loads.
//   Warpgroups 1, 2   consumers: 64 rows of the tile each. WGMMA over the tokens of the group, then epilogue.
// With 16-bit operands the producer publishes each tile with its first stage; with FP8 the consumers compute
// the same tile order themselves (kPublishesTiles). Shared memory: 3 or 4 stages of 48 KiB, output boxes,
// mbarriers (pipeline.cuh).
//
// The tokens of a stage that are past the end of a group belong to the next group; consumers zero them before
// WGMMA (16-bit: up to a multiple of 16 tokens; FP8: the whole stage). A group without tokens has a gradient
// of zero.
#pragma once

#include "common/ptx/barrier.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/shared_memory.cuh"
#include "gemm/sm90/wgrad/accumulate_epilogue.cuh"
#include "gemm/sm90/wgrad/mainloop.cuh"

namespace transformer_plugin::gemm::sm90 {

// The tiles of this CTA: index clusterid, clusterid + clusters, ... below `count`.
struct WgradTileScheduler {
  ClusterTiles tiles;  // of one group
  int tiles_per_group, count, clusters, cta_rank;

  __device__ __forceinline__ WgradTileScheduler(const WgradParams& args, int rank)
      : tiles{(args.m + kTileRows - 1) / kTileRows, (args.n + kTileColumns - 1) / kTileColumns},
        tiles_per_group(tiles.count()),
        count(args.groups * tiles_per_group),
        clusters(static_cast<int>(gridDim.x) / kCluster),
        cta_rank(rank) {}
  __device__ __forceinline__ CtaTile tile(int index) const {
    CtaTile tile = cta_tile(tiles, index % tiles_per_group, cta_rank);
    tile.group = index / tiles_per_group;
    return tile;
  }
};

__device__ __forceinline__ GroupTokens tokens_of_group(const WgradParams& args, int group) {
  return args.offsets ? GroupTokens{args.offsets[group], args.offsets[group + 1]}
                      : GroupTokens{0, args.tokens};
}
// With `accumulate`, a group without tokens adds nothing, so its tiles are skipped.
__device__ __forceinline__ bool is_skipped(const WgradParams& args, const GroupTokens& tokens) {
  return tokens.begin >= tokens.end && args.accumulate;
}

// Producer thread: loads all stages of all tiles of this CTA.
template <typename Mainloop, typename SharedStorage>
__device__ __forceinline__ void wgrad_producer_loop(const WgradTensorMaps& maps, const WgradParams& args,
                                                    const WgradTileScheduler& scheduler,
                                                    SharedStorage& shared,
                                                    PipelineState<SharedStorage>& state) {
  TokenBlocks<Mainloop::kTokensPerStage> token_blocks;
  for (int index = clusterid_x(); index < scheduler.count; index += scheduler.clusters) {
    const CtaTile tile = scheduler.tile(index);
    const GroupTokens tokens = tokens_of_group(args, tile.group);
    if constexpr (Mainloop::kPublishesTiles) {
      if (is_skipped(args, tokens)) continue;
      publish_tile(shared, state,
                   TileInfo::make(tile.group, false, tile.tile_row * kTileRows,
                                  tile.tile_column * kTileColumns, tokens.end - tokens.begin));
      if (tokens.begin >= tokens.end) {  // a stage without operands carries the TileInfo
        mbarrier_arrive(&shared.full[state.stage]);
        state.advance();
        continue;
      }
    }
    int first_block = 0;
    if constexpr (Mainloop::kBlockScales) first_block = token_blocks.before(args.offsets, tile.group);
    for (int token = tokens.begin; token < tokens.end; token += Mainloop::kTokensPerStage, state.advance()) {
      const int token_block = first_block + (token - tokens.begin) / Mainloop::kTokensPerStage;
      Mainloop::load_stage(maps, args, shared, state, scheduler.cta_rank, tile, tokens, token, token_block);
    }
  }
  if constexpr (Mainloop::kPublishesTiles) publish_end(shared, state);
}

// Consumer warpgroup: mainloop and epilogue of one tile, with first row and column `row` and `column`, of a
// group with `token_count` tokens. Both warpgroups run every stage, also without rows or columns of the
// output: zero_tokens_past_group() is a barrier of both.
template <typename Mainloop, typename Out, typename SharedStorage>
__device__ __forceinline__ void wgrad_tile(const WgradTensorMaps& maps, const WgradParams& args,
                                           SharedStorage& shared, PipelineState<SharedStorage>& state,
                                           int consumer, int group, int row, int column, int token_count) {
  const int out_row = row + consumer * kBoxRows;
  const auto output = [&] {
    Out* out = args.outs ? static_cast<Out*>(args.outs[group])
                         : static_cast<Out*>(args.out) + group * args.group_stride;
    return OutputView<Out>{out + out_row * args.row_stride + column, args.row_stride, args.m - out_row,
                           args.n - column};
  };
  const CUtensorMap& out_map = args.out_maps ? args.out_maps[group] : maps.out;
  const int matrix = args.out_maps ? 0 : group;
  if (args.out_maps && threadIdx.x % kWarpgroupSize == 0) fence_tensormap_acquire(&out_map);
  if (args.accumulate) output().prefetch(args.boxes_added_by_threads);
  if (group_beta(args, group) != 0.0f) output().prefetch(~0u);

  float acc[kAccumulators] = {};
  Mainloop::mma(shared, state, token_count, consumer, acc);

  // The gradient of a group without tokens is zero even if alpha is not finite.
  if ((Mainloop::kGroupScales || args.alpha) && token_count > 0) {
    const float factor =
        output_scale<Mainloop::kGroupScales>(args.alpha, args.grad_scale, args.input_scale, group);
#pragma unroll
    for (float& value : acc) value = value * factor;
  }
  if constexpr (sizeof(Out) == 4) {
    if (args.accumulate) {
      const AccumulateEpilogue epilogue(output(), args.boxes_added_by_threads);
      epilogue.add(acc, shared.out[consumer], consumer, [&](uint8_t* box, int offset) {
        tma_reduce_add(out_map, box, column + offset, out_row, matrix);
      });
      return;
    }
  }
  if (const float beta = group_beta(args, group); beta != 0.0f) output().add_scaled(acc, beta);
  store_accumulators<Out>(acc, shared.out[consumer], consumer, [&](uint8_t* box, int offset) {
    if (threadIdx.x % kWarpgroupSize != 0 || out_row >= args.m || column + offset >= args.n) return;
    tma_store(out_map, box, column + offset, out_row, matrix);
  });
}

// Consumer warpgroup: all tiles of this CTA.
template <typename Mainloop, typename Out, typename SharedStorage>
__device__ __forceinline__ void wgrad_consumer_loop(const WgradTensorMaps& maps, const WgradParams& args,
                                                    const WgradTileScheduler& scheduler,
                                                    SharedStorage& shared,
                                                    PipelineState<SharedStorage>& state, int consumer) {
  const auto compute = [&](int group, int row, int column, int token_count) {
    wgrad_tile<Mainloop, Out>(maps, args, shared, state, consumer, group, row, column, token_count);
  };
  if constexpr (Mainloop::kPublishesTiles) {
    TileInfo tile;
    while (fetch_tile(shared, state, tile)) compute(tile.group(), tile.row, tile.column, tile.rows);
  } else {
    for (int index = clusterid_x(); index < scheduler.count; index += scheduler.clusters) {
      const CtaTile tile = scheduler.tile(index);
      const GroupTokens tokens = tokens_of_group(args, tile.group);
      if (is_skipped(args, tokens)) continue;
      compute(tile.group, tile.tile_row * kTileRows, tile.tile_column * kTileColumns,
              tokens.end - tokens.begin);
    }
  }
  if (threadIdx.x % kWarpgroupSize == 0) cp_async_bulk_wait_group_read<0>();
}

template <typename Mainloop, typename Out>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    sm90_grouped_wgrad_kernel(const __grid_constant__ WgradTensorMaps maps,
                              const __grid_constant__ WgradParams args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using SharedStorage = typename Mainloop::SharedStorage;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupSize, 0);
  const int cta_rank = static_cast<int>(cluster_ctarank());
  if (threadIdx.x == 0) {
    prefetch_tensormap(maps.grad);
    prefetch_tensormap(maps.input);
    prefetch_tensormap(maps.out);
  }
  init_pipeline(shared);
  pdl_wait();  // no pdl_launch_dependents(), as in sm90_grouped_gemm_kernel
  const WgradTileScheduler scheduler(args, cta_rank);
  PipelineState<SharedStorage> state;
  if (warpgroup == 0) {
    warpgroup_reg_dealloc<kProducerRegisters>();
    if (threadIdx.x == 0) wgrad_producer_loop<Mainloop>(maps, args, scheduler, shared, state);
    __syncwarp();  // cluster_sync() needs converged warps
  } else {
    warpgroup_reg_alloc<kConsumerRegisters>();
    wgrad_consumer_loop<Mainloop, Out>(maps, args, scheduler, shared, state, warpgroup - 1);
  }
  cluster_sync();  // a CTA must not exit while the other may still arrive at its mbarriers
#endif
}

// The tensor maps of the operands and of `out`.
template <typename Mainloop>
WgradTensorMaps make_wgrad_maps(const GroupedGemmArgs& args) {
  WgradTensorMaps maps{};
  Mainloop::encode(maps, args);
  maps.out = tensor_map({.data = args.out,
                         .dtype = args.out_dtype,
                         .columns = args.n,
                         .rows = args.m,
                         .count = args.list.addresses ? 1 : args.groups,
                         .row_stride = args.out_row_stride,
                         .matrix_stride = args.out_group_stride},
                        kBoxRows);
  return maps;
}

// `out_maps`: of a list of outputs, or null.
inline WgradParams make_wgrad_params(const GroupedGemmArgs& args, const Sm90Config& config,
                                     const CUtensorMap* out_maps) {
  return {.offsets = args.offsets,
          .alpha = args.alpha,
          .beta = args.beta,
          .out = args.out,
          .grad_scale = static_cast<const float*>(args.a_scale),
          .input_scale = static_cast<const float*>(args.b_scale),
          .group_stride = args.out_group_stride,
          .row_stride = args.out_row_stride,
          .groups = static_cast<int>(args.groups),
          .tokens = static_cast<int>(args.rows),
          .m = static_cast<int>(args.m),
          .n = static_cast<int>(args.n),
          .boxes_added_by_threads = config.boxes_added_by_threads,
          .accumulate = args.accumulate,
          .read_all_group_aligned = args.read_all_group_aligned,
          .out_maps = out_maps,
          .outs = args.list.addresses ? static_cast<void* const*>(args.list.workspace) : nullptr};
}

template <typename Mainloop, typename Out>
void launch_grouped_wgrad(const GroupedGemmArgs& args, const Sm90Config& config, void* stream) {
  constexpr auto kernel = sm90_grouped_wgrad_kernel<Mainloop, Out>;
  constexpr int kSharedBytes = sizeof(typename Mainloop::SharedStorage);
  static DynamicSharedMemory shared_memory;
  shared_memory.allow(kernel, kSharedBytes);
  const WgradTensorMaps maps = make_wgrad_maps<Mainloop>(args);
  const CUtensorMap* out_maps = launch_pointer_array(args.list, args.groups, &maps.out, stream);
  launch_pdl(kernel, grid_blocks(config), kThreads, kSharedBytes, static_cast<cudaStream_t>(stream), maps,
             make_wgrad_params(args, config, out_maps));
  check_launch("sm90_grouped_wgrad_kernel");
}

}  // namespace transformer_plugin::gemm::sm90
