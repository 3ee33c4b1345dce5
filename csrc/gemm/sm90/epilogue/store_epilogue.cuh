// The default epilogue of GEMMs with ragged rows: adds beta * out, rounds once, stores. Also the stores that
// other epilogues use.
#pragma once

#include "common/ptx/tma.cuh"
#include "gemm/sm90/epilogue/beta_source.cuh"
#include "gemm/sm90/params.cuh"
#include "gemm/sm90/tensor_map.h"

namespace transformer_plugin::gemm::sm90 {

// The part of `out` that a warpgroup's tile covers, before it is overwritten.
template <typename Out, typename AnyWarpgroupTile>
__device__ __forceinline__ OutputView<Out> output_view(const GroupedGemmParams& args,
                                                       const AnyWarpgroupTile& wg_tile) {
  return {static_cast<Out*>(args.out) + wg_tile.row * args.out_row_stride + wg_tile.column,
          args.out_row_stride, wg_tile.group_end - wg_tile.row, wg_tile.store_end_column - wg_tile.column};
}

// Stores the rows of a box that belong to the tile's group, by all threads of the warpgroup; TMA would
// overwrite the rows of the next group. `box_column` is the first of the box; columns from `end_column` on
// are not stored. There is no proxy fence after the reads of the box: threads write it next, not TMA.
template <typename Out>
__device__ __forceinline__ void store_rows_of_group(uint8_t* box, void* out, int64_t stride, int box_column,
                                                    int end_column, const WarpgroupTile& wg_tile) {
  constexpr int kRowChunks = kSwizzleBytes / 16, kChunkElements = 16 / sizeof(Out);
  for (int i = threadIdx.x % kWarpgroupSize; i < kBoxRows * kRowChunks; i += kWarpgroupSize) {
    const int box_row = i / kRowChunks, column = box_column + i % kRowChunks * kChunkElements;
    if (wg_tile.row + box_row < wg_tile.group_end && column < end_column) {
      Out* to = static_cast<Out*>(out) + (wg_tile.row + box_row) * stride + column;
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(swizzled(box, box_row, i % kRowChunks));
    }
  }
}

// Rounds the accumulators and stores those that belong to the group: by TMA if all 64 rows do, otherwise by
// threads.
template <typename Out, int kOutBoxes>
__device__ __forceinline__ void store_tile(const GroupedGemmParams& args, const CUtensorMap& out_map,
                                           const WarpgroupTile& wg_tile, const float (&acc)[kAccumulators],
                                           uint8_t (&boxes)[kOutBoxes][kBoxBytes]) {
  const bool all_rows = wg_tile.row + kBoxRows <= wg_tile.group_end;
  store_accumulators<Out>(acc, boxes, wg_tile.consumer, [&](uint8_t* box, int offset) {
    if (all_rows) {
      // Columns past the end are tested here and not by ending the loop over boxes, which makes the compiler
      // move descriptors out of uniform registers.
      if (threadIdx.x % kWarpgroupSize == 0 && wg_tile.column + offset < wg_tile.store_end_column) {
        tma_store(out_map, box, wg_tile.column + offset, wg_tile.row, 0);
      }
      return;
    }
    store_rows_of_group<Out>(box, args.out, args.out_row_stride, wg_tile.column + offset,
                             wg_tile.store_end_column, wg_tile);
  });
}

// Writes zeros to `columns` columns of the rows past the last group. Called by `warps` warps of every CTA.
template <typename Out>
__device__ __forceinline__ void zero_tail_rows(const GroupedGemmParams& args, Out* out, int64_t stride,
                                               int columns, int warps, int warp) {
  constexpr int kChunkElements = 16 / sizeof(Out);
  const int step = static_cast<int>(gridDim.x) * warps;
  for (int row = args.offsets[args.groups] + static_cast<int>(blockIdx.x) * warps + warp; row < args.rows;
       row += step) {
    Out* out_row = out + row * stride;
    for (int i = threadIdx.x % kWarpSize * kChunkElements; i < columns; i += kWarpSize * kChunkElements) {
      *reinterpret_cast<uint4*>(out_row + i) = uint4{};
    }
  }
}
template <typename Out>
__device__ __forceinline__ void zero_tail_rows(const GroupedGemmParams& args, int warps, int warp) {
  if (!args.zero_tail) return;
  zero_tail_rows(args, static_cast<Out*>(args.out), args.out_row_stride, args.n, warps, warp);
}

inline CUtensorMap out_map(const GroupedGemmArgs& args) {
  return tensor_map({.data = args.out,
                     .dtype = args.out_dtype,
                     .columns = args.n,
                     .rows = args.rows,
                     .count = 1,
                     .row_stride = args.out_row_stride,
                     .matrix_stride = args.rows * args.out_row_stride},
                    kBoxRows);
}

// An epilogue maps the columns of a tile to rows of B and brings accumulators to memory. This one is the
// default; the others are in activation.cuh and activation_quantize.cuh. All of them have these members.
template <typename Out>
struct StoreEpilogue {
  static constexpr bool kAllowsHalfN = true;  // half-N tiles (tile_scheduler.cuh)
  CUtensorMap out;

  using Args = GroupedGemmArgs;  // arguments of the host
  static const GroupedGemmArgs& gemm_args(const Args& args) { return args; }
  static StoreEpilogue make(const Args& args) { return {out_map(args)}; }

  __device__ __forceinline__ void prefetch_tensormaps() const { prefetch_tensormap(out); }
  // Initializes mbarriers of the epilogue. Called by one thread before fence_mbarrier_init().
  template <typename SharedStorage>
  static __device__ __forceinline__ void init_barriers(SharedStorage&) {}
  // First row of B [n, k] that TMA box `box` of tile column `tile_column` loads.
  static __device__ __forceinline__ int b_row(const GroupedGemmParams&, int tile_column, int box) {
    return tile_column * kTileColumns + box * kBoxRows;
  }
  // First logical output column (row of B [n, k], index of bias) of accumulators 4 j .. 4 j + 3 over the
  // quad. n is a multiple of 8, so all 8 columns exist or none.
  static __device__ __forceinline__ int output_column(const GroupedGemmParams&, const WarpgroupTile& wg_tile,
                                                      int j) {
    return wg_tile.column + j * 8;
  }
  // Before the mainloop of a tile: prefetches what store() reads.
  template <typename SharedStorage>
  __device__ __forceinline__ void prefetch_source(const GroupedGemmParams& args, const WarpgroupTile& wg_tile,
                                                  SharedStorage&) const {
    if (group_beta(args, wg_tile.group) != 0.0f) output_view<Out>(args, wg_tile).prefetch(~0u);
  }
  // After the mainloop, scales and bias.
  template <typename SharedStorage>
  __device__ __forceinline__ void store(const GroupedGemmParams& args, const WarpgroupTile& wg_tile,
                                        float (&acc)[kAccumulators], SharedStorage& shared) const {
    if (const float beta = group_beta(args, wg_tile.group); beta != 0.0f) {
      output_view<Out>(args, wg_tile).add_scaled(acc, beta);
    }
    store_tile<Out>(args, out, wg_tile, acc, shared.out[wg_tile.consumer]);
  }
  // Called by `warps` warps of the producer warpgroup of every CTA.
  __device__ __forceinline__ void zero_tail_rows(const GroupedGemmParams& args, int warps, int warp) const {
    sm90::zero_tail_rows<Out>(args, warps, warp);
  }
  // After the last tile: waits until TMA stores have read shared memory.
  static __device__ __forceinline__ void wait_stores() {
    if (threadIdx.x % kWarpgroupSize == 0) cp_async_bulk_wait_group_read<0>();
  }
};

}  // namespace transformer_plugin::gemm::sm90
