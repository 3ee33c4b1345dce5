// The quantize kernels with the sums of a tile's columns beside its codes.
#pragma once

#include "common/column_sums.cuh"
#include "quantize/args/bias_backward_quantize.h"
#include "quantize/cuda/tile/common.cuh"

namespace transformer_plugin::quantize {

template <typename T, typename Family, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    bias_backward_quantize_kernel(const __grid_constant__ typename Family::Args args,
                                  const __grid_constant__ ColumnSums sums) {
  __shared__ typename Family::Shared shared;
  __shared__ TileSums tile_sums;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  for_each_tile(args.layout, [&](const Tile& tile) {
    if (!Family::begin(args, tile)) return;
    Values<T> values;
    PlainSource<T>{}.load(args, tile, warp, lane, values);
    if (!tile.tail) {
      sum_tile<kRowsPerThread>([&](int r, int c) { return values.get(r, c); }, tile.cols, tile_sums,
                               sums.of_tile(tile.group, tile.row) + tile.col);
    }
    Family::write(args, tile, values, warp, lane, shared);
  });
}

// In FP8: `Family` is Fp8Family or MxFamily.
template <template <DType> typename Family>
void launch_with_sums(const QuantizeArgs& args, const ColumnSums& sums, void* stream) {
  const unsigned grid = block_grid(args.layout);
  if (grid > 0) {
    visit_device_float(args.dtype, [&](auto type) {
      visit_fp8(args.element, [&](auto element) {
        using T = decltype(type);
        bias_backward_quantize_kernel<T, Family<decltype(element)::value>, kBlocksPerSm<T>>
            <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args, sums);
      });
    });
    check_launch("bias_backward_quantize_kernel");
  }
  launch_add_tile_sums(sums, stream);
}

}  // namespace transformer_plugin::quantize
