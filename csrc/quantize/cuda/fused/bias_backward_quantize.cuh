// Quantizes a gradient and sums its columns in the same pass:
//
//   data, scale, data_t, scale_t as the tile kernel of the format;  sums[group][column] = sum over rows of x
// Input: [rows, cols] in BF16, FP16 or FP32. Grid, block and tiles are those of the tile kernel
// (fp8/tile.cuh, mxfp8/tile.cuh, nvfp4/tile.cuh). A block writes the column sums of its tile to scratch
// memory; launch_add_tile_sums adds them up in a fixed order (common/column_sums.h).
// Shared memory: that of the format's tile, and partial sums of 8 warps.
#pragma once

#include "common/column_sums.cuh"
#include "quantize/args/bias_backward_quantize.h"
#include "quantize/cuda/tile/common.cuh"

namespace transformer_plugin::quantize {

template <typename T, typename TileOps, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    bias_backward_quantize_kernel(const __grid_constant__ typename TileOps::Args args,
                                  const __grid_constant__ ColumnSums sums) {
  __shared__ typename TileOps::Shared shared;
  __shared__ TileSums tile_sums;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  TileOps::store_whole_scales(args);
  for_each_tile(args.layout, [&](const Tile& tile) {
    if (!TileOps::begin(args, tile)) return;
    TileFragment<T> values;
    PlainSource<T>{}.load(args, tile, warp, lane, values);
    if (!tile.tail) {
      sum_tile<kRowsPerThread>([&](int r, int c) { return values.get(r, c); }, tile.cols, tile_sums,
                               sums.of_tile(tile.group, tile.row) + tile.col);
    }
    TileOps::write(args, tile, values, warp, lane, shared);
  });
}

// For FP8: `TileOps` is Fp8TileOps or MxTileOps.
template <template <DType> typename TileOps>
void launch_bias_backward_fp8(const QuantizeArgs& args, const ColumnSums& sums, void* stream) {
  const unsigned grid = block_grid(args.layout);
  if (grid > 0) {
    visit_float_fp8(args.dtype, args.element, [&](auto type, auto element) {
      using T = decltype(type);
      bias_backward_quantize_kernel<T, TileOps<decltype(element)::value>, kBlocksPerSm<T>>
          <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args, sums);
    });
    check_launch("bias_backward_quantize_kernel");
  }
  launch_add_tile_sums(sums, stream);
}

}  // namespace transformer_plugin::quantize
