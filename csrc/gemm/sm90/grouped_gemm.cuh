// Grouped GEMM with ragged rows on Hopper. For the rows i of group g, offsets[g] <= i < offsets[g + 1]:
//
//   out[i] = a[i] @ B_g * alpha[g] + bias_scale[i] * bias[g] + beta[g] * out[i]
//
// (the product times the operands' scales; alpha does not multiply the bias), computed in FP32 and rounded
// once. Other epilogues replace the last term and the store (epilogue/).
//
//   a    [T, k], K-major (row-major); T rows of all groups and of the tail after them (args.rows)
//   B_g  b[g]^T for b [G, n, k] (kFprop), b[g] for b [G, k, n] (kDgrad, 16-bit only: FP8 data gradients are
//        kFprop on a transposed quantized weight); b is a stack or a list of G matrices
//   out  [T, n], row stride out_row_stride
//
// Operand formats are mainloop policies (mainloop.cuh): BF16, FP16, FP8 with scales of blocks, groups or
// rows.
//
// Grid: persistent, at most one CTA for each SM, in clusters of 2 CTAs; each CTA computes tiles of 128 x 256
// (tile_order.cuh, tile_scheduler.cuh). Block: 3 warpgroups of 128 threads.
//   Warp 0            runs the tile scheduler; its lane 0 publishes tiles and starts all TMA loads.
//   Warps 1-3         write zeros to the rows past the last group, if asked to.
//   Warpgroups 1, 2   consumers: 64 rows of the tile each. WGMMA m64n256k16 (FP8: m64n128k32) with 128 FP32
//                     accumulators a thread, then the epilogue.
// Shared memory: 4 stages of 48 KiB (128 bytes of K of 128 rows of A and 256 of B), 2 output boxes of 8 KiB
// for each consumer, mbarriers, and scales with MainloopFp8Block (pipeline.cuh).
//
// TMA loads whole boxes. Rows past the end of a group belong to the next group; they are multiplied, but not
// stored.
#pragma once

#include "common/ptx/barrier.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/shared_memory.cuh"
#include "gemm/sm90/epilogue/store_epilogue.cuh"
#include "gemm/sm90/mainloop.cuh"
#include "gemm/sm90/tensor_map.h"
#include "gemm/sm90/tile_scheduler.cuh"

namespace transformer_plugin::gemm::sm90 {

// Multiplies by a_scale of the output row times b_scale of the output column, which is a row of B [n, k]
// (args/rowwise_scales.h).
template <typename Epilogue>
__device__ __forceinline__ void apply_row_scales(const GroupedGemmParams& args, const WarpgroupTile& wg_tile,
                                                 float (&acc)[kAccumulators]) {
  const int lane = threadIdx.x % kWarpSize;
  const int row0 = thread_row(wg_tile.row, lane), row1 = row0 + 8;
  const float scale0 = row0 < wg_tile.group_end ? args.a_scale[row0] : 0.0f;
  const float scale1 = row1 < wg_tile.group_end ? args.a_scale[row1] : 0.0f;
  const float* b_scale = args.b_scale + static_cast<int64_t>(wg_tile.group) * args.n;
#pragma unroll
  for (int j = 0; j < kTileColumns / 8; ++j) {
    const int column = Epilogue::output_column(args, wg_tile, j) + lane % 4 * 2;
    if (column < args.n) {
      const float2 scale = *reinterpret_cast<const float2*>(b_scale + column);  // n is a multiple of 8
      acc[j * 4] = acc[j * 4] * (scale0 * scale.x);
      acc[j * 4 + 1] = acc[j * 4 + 1] * (scale0 * scale.y);
      acc[j * 4 + 2] = acc[j * 4 + 2] * (scale1 * scale.x);
      acc[j * 4 + 3] = acc[j * 4 + 3] * (scale1 * scale.y);
    }
  }
}

// Applies scales of rows or groups, alpha and bias, in FP32.
template <typename Mainloop, typename Epilogue = StoreEpilogue<typename Mainloop::Out>>
__device__ __forceinline__ void scale_and_add_bias(const GroupedGemmParams& args,
                                                   const WarpgroupTile& wg_tile,
                                                   float (&acc)[kAccumulators]) {
  if constexpr (Mainloop::kRowScales) apply_row_scales<Epilogue>(args, wg_tile, acc);
  if (Mainloop::kGroupScales || args.alpha) {
    const float factor =
        output_scale<Mainloop::kGroupScales>(args.alpha, args.a_scale, args.b_scale, wg_tile.group);
#pragma unroll
    for (float& value : acc) value = value * factor;
  }
  if (!args.bias) return;
  const int lane = threadIdx.x % kWarpSize;
  const int row0 = thread_row(wg_tile.row, lane), row1 = row0 + 8;
  const float scale0 = args.bias_scale && row0 < wg_tile.group_end ? args.bias_scale[row0] : 1.0f;
  const float scale1 = args.bias_scale && row1 < wg_tile.group_end ? args.bias_scale[row1] : 1.0f;
  const float* bias = args.bias + static_cast<int64_t>(wg_tile.group) * args.n;
#pragma unroll
  for (int j = 0; j < kTileColumns / 8; ++j) {
    const int column = Epilogue::output_column(args, wg_tile, j) + lane % 4 * 2;
    if (column < args.n) {
      const float x = bias[column], y = bias[column + 1];
      acc[j * 4] = fmaf(scale0, x, acc[j * 4]);
      acc[j * 4 + 1] = fmaf(scale0, y, acc[j * 4 + 1]);
      acc[j * 4 + 2] = fmaf(scale1, x, acc[j * 4 + 2]);
      acc[j * 4 + 3] = fmaf(scale1, y, acc[j * 4 + 3]);
    }
  }
}

// Producer warp: loads all stages of all tiles of this CTA. `b_maps`: one tensor map per group for a list of
// B matrices. Null for a stack, which `b_map` describes.
template <typename Mainloop, typename Epilogue, typename SharedStorage>
__device__ __forceinline__ void producer_loop(const GroupedGemmParams& args, const CUtensorMap& a_map,
                                              const CUtensorMap& b_map, const CUtensorMap* b_maps,
                                              const typename Mainloop::ScaleMaps& scale_maps,
                                              SharedStorage& shared, PipelineState<SharedStorage>& state,
                                              int steps, int cta_rank) {
  using Element = typename Mainloop::Element;
  TileScheduler scheduler(args, cta_rank);
  int last_group = -1;
  for_each_tile<Epilogue::kAllowsHalfN>(scheduler, [&](const CtaTile& tile, auto halves) {
    const int row = scheduler.group_begin + tile.tile_row * kTileRows;
    if (threadIdx.x == 0) {
      publish_tile(shared, state, make_tile_info(scheduler, tile, halves));
      const bool is_list = b_maps != nullptr;
      const CUtensorMap& group_map = is_list ? b_maps[tile.group] : b_map;
      const int matrix = is_list ? 0 : tile.group;
      if (is_list && tile.group != last_group) fence_tensormap_acquire(&group_map);
      last_group = tile.group;
#pragma unroll 1
      for (int step = 0; step < steps; ++step, state.advance()) {
        const int k = step * kTileK<Element>;
        producer_load<decltype(halves)::kBoxes>(
            shared, state, cta_rank, tile.shares_b,
            [&](void* to, int box, uint64_t* barrier, bool multicast) {
              tma_load_or_multicast(multicast, to, a_map, barrier, k, row + box * kBoxRows, 0);
            },
            [&](void* to, int box, uint64_t* barrier, bool multicast) {
              const int b_row = Epilogue::b_row(args, tile.tile_column, halves.first_box() + box);
              Mainloop::kBMnMajor
                  ? tma_load_or_multicast(multicast, to, group_map, barrier, b_row, k, matrix)
                  : tma_load_or_multicast(multicast, to, group_map, barrier, k, b_row, matrix);
            },
            Mainloop::ScaleMaps::kBytes);
        scale_maps.load_stage(shared, state, tile.group, row, halves.column(tile), step);
      }
    }
    __syncwarp();
  });
  if (threadIdx.x == 0) publish_end(shared, state);  // not read if the last tile was half-N
}

// Consumer warpgroup: mainloop and epilogue of all tiles of this CTA.
template <typename Mainloop, typename Epilogue, typename SharedStorage>
__device__ __forceinline__ void consumer_loop(const GroupedGemmParams& args, const Epilogue& epilogue,
                                              SharedStorage& shared, PipelineState<SharedStorage>& state,
                                              int steps, int consumer) {
  const auto compute = [&](const TileInfo& tile, auto halves) {
    using Halves = decltype(halves);
    const WarpgroupTile wg_tile{
        .group = tile.group(),
        .consumer = consumer,
        .row = tile.row + consumer * kBoxRows,
        .group_end = tile.row + tile.rows,
        .column = tile.column,
        // The end of a full tile is not cut: the stores test against n only.
        .store_end_column =
            Halves::kCount == 2 ? args.n : min(tile.column + Halves::kBoxes * kBoxRows, args.n)};
    // The warpgroup has no rows of the group, or no columns: it only releases the stages.
    if (wg_tile.row >= wg_tile.group_end || wg_tile.column >= args.n) {
#pragma unroll 1
      for (int step = 0; step < steps; ++step, state.advance()) {
        mbarrier_wait(&shared.full[state.stage], state.phase);
        consumer_release(&shared.empty[state.stage]);
      }
      return;
    }
    epilogue.prefetch_source(args, wg_tile, shared);
    float acc[kAccumulators] = {};
    Mainloop::template mma<Halves::kCount>(args, shared, state, steps, wg_tile, acc);
    scale_and_add_bias<Mainloop, Epilogue>(args, wg_tile, acc);
    epilogue.store(args, wg_tile, acc, shared);
  };
  TileInfo tile;
  bool found = fetch_tile(shared, state, tile);
  for (; found && is_full_n<Epilogue::kAllowsHalfN>(tile); found = fetch_tile(shared, state, tile)) {
    compute(tile, ColumnHalves<2>{});
  }
  // At most one half-N tile, the last. It is code outside of the loop, which keeps WGMMA descriptors in
  // uniform registers.
  if (Epilogue::kAllowsHalfN && found) compute(tile, ColumnHalves<1>{});
  Epilogue::wait_stores();
}

template <typename Mainloop, typename Epilogue>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    sm90_grouped_gemm_kernel(const __grid_constant__ CUtensorMap a_map,
                             const __grid_constant__ CUtensorMap b_map,
                             const __grid_constant__ typename Mainloop::ScaleMaps scale_maps,
                             const __grid_constant__ Epilogue epilogue,
                             const __grid_constant__ GroupedGemmParams args, const CUtensorMap* b_maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Element = typename Mainloop::Element;
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  using SharedStorage = typename Mainloop::SharedStorage;
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupSize, 0);
  const int cta_rank = static_cast<int>(cluster_ctarank());
  if (threadIdx.x == 0) {
    prefetch_tensormap(a_map);
    prefetch_tensormap(b_map);
    epilogue.prefetch_tensormaps();
    Epilogue::init_barriers(shared);
  }
  init_pipeline(shared);
  // No pdl_launch_dependents(): this CTA has the shared memory and nearly all registers of its SM, so a CTA
  // of the next kernel would find no room before it exits.
  pdl_wait();
  const int steps = (args.k + kTileK<Element> - 1) / kTileK<Element>;  // k > 0 (sm90_unsupported_shape)
  PipelineState<SharedStorage> state;
  if (warpgroup == 0) {
    warpgroup_reg_dealloc<kProducerRegisters>();
    if (threadIdx.x >= kWarpSize) {
      epilogue.zero_tail_rows(args, kWarpgroupSize / kWarpSize - 1, threadIdx.x / kWarpSize - 1);
    } else {
      producer_loop<Mainloop, Epilogue>(args, a_map, b_map, b_maps, scale_maps, shared, state, steps,
                                        cta_rank);
    }
    __syncwarp();  // cluster_sync() needs converged warps
  } else {
    warpgroup_reg_alloc<kConsumerRegisters>();
    consumer_loop<Mainloop>(args, epilogue, shared, state, steps, warpgroup - 1);
  }
  cluster_sync();  // a CTA must not exit while the other may still arrive at its mbarriers
#endif
}

// Tensor map of B: of the stack, or of the first matrix of a list.
template <typename Mainloop>
CUtensorMap b_tensor_map(const GroupedGemmArgs& args) {
  static_assert(!Mainloop::kBMnMajor || kTileK<typename Mainloop::Element> == kBoxRows,
                "a box of MN-major B is the K of one stage");
  const int64_t columns = Mainloop::kBMnMajor ? args.n : args.k, rows = Mainloop::kBMnMajor ? args.k : args.n;
  return tensor_map({.data = args.b,
                     .dtype = args.dtype,
                     .columns = columns,
                     .rows = rows,
                     .count = args.list.addresses ? 1 : args.groups,
                     .row_stride = columns,
                     .matrix_stride = rows * columns},
                    kBoxRows);
}

template <typename Mainloop, typename Epilogue = StoreEpilogue<typename Mainloop::Out>>
void launch_grouped_gemm(const typename Epilogue::Args& epilogue_args, const Sm90Config& config,
                         void* stream) {
  constexpr auto kernel = sm90_grouped_gemm_kernel<Mainloop, Epilogue>;
  constexpr int kSharedBytes = sizeof(typename Mainloop::SharedStorage);
  static DynamicSharedMemory shared_memory;
  shared_memory.allow(kernel, kSharedBytes);
  const GroupedGemmArgs& args = Epilogue::gemm_args(epilogue_args);
  const CUtensorMap a = tensor_map({.data = args.a,
                                    .dtype = args.dtype,
                                    .columns = args.k,
                                    .rows = args.rows,
                                    .count = 1,
                                    .row_stride = args.k,
                                    .matrix_stride = args.rows * args.k},
                                   kBoxRows);
  const CUtensorMap b = b_tensor_map<Mainloop>(args);
  const CUtensorMap* b_maps = launch_pointer_array(args.list, args.groups, &b, stream);
  launch_pdl(kernel, grid_blocks(config), kThreads, kSharedBytes, static_cast<cudaStream_t>(stream), a, b,
             Mainloop::ScaleMaps::make(args), Epilogue::make(epilogue_args), make_params(args), b_maps);
  check_launch("sm90_grouped_gemm_kernel");
}

}  // namespace transformer_plugin::gemm::sm90
