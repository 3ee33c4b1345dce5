// Grouped GEMM of MXFP8 or NVFP4 operands with ragged rows on Hopper. For the rows i of group g:
//
//   out[i] = dequantize(a[i]) @ dequantize(b[g])^T * alpha[g] + bias_scale[i] * bias[g] + beta[g] * out[i]
//
//   a    [T, k], b [G, n, k]: K-major. MXFP8 (E4M3 or E5M2, one E8M0 scale for 32 elements), or
//        NVFP4 (E2M1, one E4M3 scale for 16 elements)
//   out  [T, n], BF16
//
// Hopper's tensor cores know no such scales, so both operands are dequantized to BF16, exactly. A and B are
// swapped: the kernel computes out^T, with the weights b as operand A of WGMMA and the rows a as operand B.
//   A (weights)  TMA loads quantized data to shared memory. Each thread dequantizes its WGMMA fragment into
//                registers, while the WGMMAs of the previous step run (dequantize_a_operand.cuh). Global
//                memory never has a BF16 copy of the weights.
//   B (rows)     Dequantized once to global memory (dequantize_b_prepass.cuh), by a kernel before this one or
//                by idle warps of this kernel, and loaded by TMA as BF16.
// Dequantizing both operands through shared memory instead is slower: WGMMA takes half of the shared memory
// bandwidth.
//
// Grid: persistent, at most one CTA for each SM, in clusters of 2 CTAs; each CTA computes tiles of 128
// columns x 256 rows of the output. Block: 3 warpgroups of 128 threads.
//   Warp 0            producer: runs the tile scheduler; lane 0 starts all TMA loads.
//   Warps 1-3         dequantize rows if that is overlapped; then zero the rows past the last group.
//   Warpgroups 1, 2   consumers: 64 columns x 256 rows each. They run the same tile scheduler.
// Shared memory: 3 stages of 16 KiB of A, 4 stages of 32 KiB of B, 2 output boxes of 8 KiB for each consumer,
// mbarriers.
#pragma once

#include "common/ptx/barrier.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/memory.cuh"
#include "common/ptx/stmatrix.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "gemm/sm90/grouped_gemm.cuh"
#include "gemm/sm90/microscaled/mma_dequantized.cuh"

namespace transformer_plugin::gemm::sm90 {

using SwapAbTileScheduler = BasicTileScheduler<true>;

// Scales and bias for accumulators of out^T. Of the 16 columns of its warp a thread has columns l = lane / 4
// (acc[4 j], acc[4 j + 1]) and l + 8 (acc[4 j + 2], acc[4 j + 3]), in rows 8 j + 2 (lane % 4) and the next.
__device__ __forceinline__ void scale_and_add_bias_transposed(const GroupedGemmParams& args,
                                                              const SwapAbWarpgroupTile& wg_tile,
                                                              float residual_scale,
                                                              float (&acc)[kAccumulators]) {
  const float factor = args.alpha ? args.alpha[wg_tile.group] : 1.0f;
#pragma unroll
  for (float& value : acc) value = value * residual_scale * factor;
  if (!args.bias) return;
  const int lane = threadIdx.x % kWarpSize;
  // A and B are swapped: rows of the accumulators are columns.
  const int column = thread_row(wg_tile.column, lane);
  const float* bias = args.bias + static_cast<int64_t>(wg_tile.group) * args.n;
  const float bias0 = column < args.n ? bias[column] : 0.0f;
  const float bias1 = column + 8 < args.n ? bias[column + 8] : 0.0f;
#pragma unroll
  for (int j = 0; j < kTileColumns / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = wg_tile.row + j * 8 + lane % 4 * 2 + i;
      const float scale = args.bias_scale && row < wg_tile.group_end ? args.bias_scale[row] : 1.0f;
      acc[j * 4 + i] = fmaf(scale, bias0, acc[j * 4 + i]);
      acc[j * 4 + 2 + i] = fmaf(scale, bias1, acc[j * 4 + 2 + i]);
    }
  }
}

// Rounds the accumulators and stores them, 64 rows of the output at a time. stmatrix transposes 8 x 8
// matrices on the way.
__device__ __forceinline__ void store_transposed(const GroupedGemmParams& args, const CUtensorMap& out_map,
                                                 const SwapAbWarpgroupTile& wg_tile,
                                                 const float (&acc)[kAccumulators],
                                                 uint8_t (&boxes)[MxNvSharedStorage::kOutBoxes][kBoxBytes]) {
  using Out = __nv_bfloat16;
  const bool is_leader = threadIdx.x % kWarpgroupSize == 0;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x % kWarpgroupSize / kWarpSize;
#pragma unroll
  for (int i = 0; i < kTileColumns / kBoxRows; ++i) {
    const int row = wg_tile.row + i * kBoxRows;
    if (row >= wg_tile.group_end) break;
    uint8_t* box = boxes[i % MxNvSharedStorage::kOutBoxes];
    if (is_leader) cp_async_bulk_wait_group_read<MxNvSharedStorage::kOutBoxes - 1>();
    named_barrier_sync(kBarrierOfConsumer + wg_tile.consumer, kWarpgroupSize);
#pragma unroll
    for (int j = 0; j < kBoxRows / 8; j += 2) {
      const float* values = &acc[i * 32 + j * 4];
      const uint32_t words[] = {pack2<Out>(values[0], values[1]), pack2<Out>(values[2], values[3]),
                                pack2<Out>(values[4], values[5]), pack2<Out>(values[6], values[7])};
      stmatrix_x4_trans(swizzled(box, j * 8 + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2), words);
    }
    fence_proxy_async();
    named_barrier_sync(kBarrierOfConsumer + wg_tile.consumer, kWarpgroupSize);
    if (row + kBoxRows <= wg_tile.group_end) {
      if (is_leader) tma_store(out_map, box, wg_tile.column, row, 0);
    } else {  // rows of the next group follow
      const WarpgroupTile box_tile{.group = wg_tile.group,
                                   .consumer = wg_tile.consumer,
                                   .row = row,
                                   .group_end = wg_tile.group_end,
                                   .column = wg_tile.column,
                                   .store_end_column = wg_tile.store_end_column};
      store_rows_of_group<Out>(box, args.out, args.out_row_stride, wg_tile.column, args.n, box_tile);
      fence_proxy_async();  // redundant: threads write the box next, not TMA (store_rows_of_group)
    }
    if (is_leader) cp_async_bulk_commit_group();
  }
}

// Producer warp: loads all stages of all tiles of this CTA.
template <typename Format>
__device__ __forceinline__ void mx_nv_producer_loop(const GroupedGemmParams& args, const CUtensorMap& a_map,
                                                    const CUtensorMap& b_map,
                                                    const OverlappedDequantize& overlapped,
                                                    MxNvSharedStorage& shared, int steps, int cta_rank) {
  const int clusters = static_cast<int>(gridDim.x) / kCluster;
  APipelineState a_state;
  BPipelineState b_state;
  CtaTile tile;
  SwapAbTileScheduler scheduler(args, cta_rank);
  for (int index = clusterid_x(); scheduler.find_tile(index, tile); index += clusters) {
    const int column = tile.tile_row * kTileRows;
    const int row = scheduler.group_begin + tile.tile_column * kTileColumns;
    if (overlapped.ready && row < scheduler.group_end) {
      overlapped.wait_rows(row, min(row + kTileColumns, scheduler.group_end), args.k);
    }
    if (threadIdx.x == 0) {
#pragma unroll 1
      for (int step = 0; step < steps; ++step, b_state.advance()) {
        if (step % kStepsPerBox<Format> == 0) {
          uint64_t* full = &shared.a_full[a_state.stage];
          auto& boxes = shared.a[a_state.stage];
          const int byte = step * kStepBytes<Format>;
          mbarrier_wait(&shared.a_empty[a_state.stage], a_state.phase ^ 1);
          mbarrier_arrive_expect_tx(full, sizeof(boxes));
          for (int box = 0; box < kABoxes; ++box) {  // if the CTAs share A, each loads one box for both
            if (!tile.shares_b && box != cta_rank) continue;
            tma_load_or_multicast(!tile.shares_b, boxes[box], a_map, full, byte, column + box * kBoxRows,
                                  tile.group);
          }
          a_state.advance();
        }
        mbarrier_wait(&shared.b_empty[b_state.stage], b_state.phase ^ 1);
        producer_load_b(shared.b[b_state.stage], &shared.b_full[b_state.stage], cta_rank, tile.shares_b,
                        [&](void* to, int box, uint64_t* barrier, bool multicast) {
                          tma_load_or_multicast(multicast, to, b_map, barrier, step * kStepElements,
                                                row + box * kBoxRows, 0);
                        });
      }
    }
    __syncwarp();
  }
}

// Consumer warpgroup: mainloop and epilogue of all tiles of this CTA.
template <typename Format>
__device__ __forceinline__ void mx_nv_consumer_loop(const GroupedGemmParams& args, const CUtensorMap& out_map,
                                                    const ByteScales& scales, MxNvSharedStorage& shared,
                                                    int steps, int cta_rank, int consumer) {
  using Out = __nv_bfloat16;
  const int clusters = static_cast<int>(gridDim.x) / kCluster;
  APipelineState a_state;
  BPipelineState b_state;
  CtaTile tile;
  const WarpgroupOrder<Format::kOrderedWarpgroups> order(consumer);
  SwapAbTileScheduler scheduler(args, cta_rank);
  for (int index = clusterid_x(); scheduler.find_tile(index, tile); index += clusters) {
    const SwapAbWarpgroupTile wg_tile{.group = tile.group,
                                      .consumer = consumer,
                                      .column = tile.tile_row * kTileRows + consumer * kBoxRows,
                                      .store_end_column = args.n,
                                      .row = scheduler.group_begin + tile.tile_column * kTileColumns,
                                      .group_end = scheduler.group_end};
    if (wg_tile.row >= wg_tile.group_end || wg_tile.column >= args.n) {
      skip_tile<Format>(shared, a_state, b_state, order, steps);
      continue;
    }
    if (group_beta(args, wg_tile.group) != 0.0f) {
      output_view<Out>(args, wg_tile).template prefetch<kTileColumns, kBoxRows>(~0u);
    }
    float acc[kAccumulators] = {};
    if (wg_tile.row + kTileColumns / 2 < wg_tile.group_end) {
      mma_dequantized<Format, 2>(args, scales, shared, a_state, b_state, order, steps, wg_tile, acc);
    } else {
      mma_dequantized<Format, 1>(args, scales, shared, a_state, b_state, order, steps, wg_tile, acc);
    }
    scale_and_add_bias_transposed(args, wg_tile, Format::kResidualScale * Format::kResidualScale, acc);
    if (const float beta = group_beta(args, wg_tile.group); beta != 0.0f) {
      output_view<Out>(args, wg_tile).add_scaled_transposed(acc, beta);
    }
    store_transposed(args, out_map, wg_tile, acc, shared.out[consumer]);
  }
  order.finish();
  if (threadIdx.x % kWarpgroupSize == 0) cp_async_bulk_wait_group_read<0>();
}

// Format is that of the weights.
template <typename Format>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    sm90_grouped_gemm_mx_nv_kernel(const __grid_constant__ CUtensorMap b_map,
                                   const __grid_constant__ CUtensorMap a_map,
                                   const __grid_constant__ CUtensorMap out_map,
                                   const __grid_constant__ ByteScales scales,
                                   const __grid_constant__ OverlappedDequantize overlapped,
                                   const __grid_constant__ GroupedGemmParams args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  MxNvSharedStorage& shared = *reinterpret_cast<MxNvSharedStorage*>(dynamic_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupSize, 0);
  const int cta_rank = static_cast<int>(cluster_ctarank());
  if (threadIdx.x == 0) {
    prefetch_tensormap(b_map);
    prefetch_tensormap(a_map);
    prefetch_tensormap(out_map);
  }
  init_pipelines(shared);
  pdl_wait();
  const int steps = (args.k + kStepElements - 1) / kStepElements;
  if (warpgroup == 0) {
    warpgroup_reg_dealloc<kProducerRegisters>();
    if (threadIdx.x >= kWarpSize) {
      const int warp = threadIdx.x / kWarpSize - 1;
      if (overlapped.ready) {
        const int end = args.offsets ? args.offsets[args.groups] : args.rows;
        overlapped.template run<Format>(end, args.k);
      }
      zero_tail_rows<__nv_bfloat16>(args, kWarpgroupSize / kWarpSize - 1, warp);
    } else {
      mx_nv_producer_loop<Format>(args, a_map, b_map, overlapped, shared, steps, cta_rank);
    }
  } else {
    warpgroup_reg_alloc<kConsumerRegisters>();
    mx_nv_consumer_loop<Format>(args, out_map, scales, shared, steps, cta_rank, warpgroup - 1);
  }
  cluster_sync();  // a CTA must not exit while the other may still arrive at its mbarriers
#endif
}

// RowFormat and WeightFormat are the formats of args.a and args.b.
template <typename RowFormat, typename WeightFormat>
void launch_grouped_gemm_mx_nv(const GroupedGemmArgs& args, const Sm90Config& config, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const bool overlaps = config.overlaps_dequantize;
  overlaps ? launch_clear_ready(args, stream) : launch_dequantize_rows<RowFormat>(args, stream);
  constexpr auto kernel = sm90_grouped_gemm_mx_nv_kernel<WeightFormat>;
  static DynamicSharedMemory shared_memory;
  constexpr int kSharedBytes = sizeof(MxNvSharedStorage);
  shared_memory.allow(kernel, kSharedBytes);
  const int64_t padded = dequantized_columns(args.k);
  const int64_t row_bytes = args.k * static_cast<int64_t>(sizeof(typename WeightFormat::Packed)) / kChunk;
  const CUtensorMap rows = tensor_map({.data = args.a_dequantized,
                                       .dtype = DType::kBFloat16,
                                       .columns = padded,
                                       .rows = args.rows,
                                       .count = 1,
                                       .row_stride = padded,
                                       .matrix_stride = args.rows * padded},
                                      kBoxRows);
  const CUtensorMap weights = tensor_map({.data = args.b,
                                          .dtype = args.dtype,
                                          .columns = row_bytes,
                                          .rows = args.n,
                                          .count = args.groups,
                                          .row_stride = row_bytes,
                                          .matrix_stride = args.n * row_bytes},
                                         kBoxRows);
  const ByteScales scales{static_cast<const uint8_t*>(args.b_scale), scale_width<WeightFormat>(args.k),
                          args.b_tiled};
  OverlappedDequantize overlapped{};
  if (overlaps) {
    overlapped = {make_quantized_rows<WeightFormat>(args), static_cast<uint32_t*>(args.a_ready_rows),
                  args.dtype == DType::kFloat8E5M2};
  }
  launch_pdl(kernel, grid_blocks(config), kThreads, kSharedBytes, stream, rows, weights, out_map(args),
             scales, overlapped, make_params(args));
  check_launch("sm90_grouped_gemm_mx_nv_kernel");
}

}  // namespace transformer_plugin::gemm::sm90
