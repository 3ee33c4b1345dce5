// requantize_transposed for FP8. With per-tensor scales transpose_data_kernel transposes the bytes:
// block_grid(layout) blocks of 256 threads, a tile of 128x128 bytes in shared memory. Otherwise the tile
// kernel (fp8/tile.cuh) with a source that dequantizes.
#include "quantize/args/requantize_transposed.h"
#include "quantize/cuda/dequantize/source.cuh"
#include "quantize/cuda/fp8/tile.cuh"

namespace transformer_plugin::quantize {
namespace {

__global__ void __launch_bounds__(kThreads)
    transpose_data_kernel(const __grid_constant__ RequantizeArgs args) {
  __shared__ TransposedTile transposed_tile;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  for_each_tile(args.to.layout, [&](const Tile& tile) {
    if (tile.rows == 0) return;
    uint32_t bytes[kRowsPerThread];
    load_tile_bytes(args.from, tile, warp, lane, bytes);
    uint4 columns[kColsPerThread];
#pragma unroll
    for (int word = 0; word < kRowsPerThread / 4; ++word) {
      const uint32_t rows[4] = {bytes[4 * word], bytes[4 * word + 1], bytes[4 * word + 2],
                                bytes[4 * word + 3]};
      uint32_t words[4];
      transpose_4x4(rows, words);
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) (&columns[c].x)[word] = words[c];
    }
#pragma unroll
    for (int c = 0; c < kColsPerThread; ++c)
      transposed_tile.chunk(lane * kColsPerThread + c, warp) = columns[c];
    __syncthreads();
    store_transposed(args.to, tile, warp, lane, transposed_tile);
  });
}

}  // namespace

void launch_transpose_data(const RequantizeArgs& args, void* stream) {
  const unsigned grid = block_grid(args.to.layout);
  if (grid == 0) return;
  transpose_data_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  check_launch("transpose_data_kernel");
}

void launch_requantize_transposed(const RequantizeArgs& args, void* stream) {
  const unsigned grid = block_grid(args.to.layout);
  if (grid == 0) return;
  visit_float_fp8(args.to.dtype, args.to.element, [&](auto type, auto element) {
    using Source = DequantizeSource<decltype(type), decltype(element)::value>;
    quantize_kernel<Source, decltype(element)::value>
        <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args.to, Source{args.from});
  });
  check_launch("quantize_kernel");
}

}  // namespace transformer_plugin::quantize
