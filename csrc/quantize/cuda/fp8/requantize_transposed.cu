#include "quantize/args/requantize_transposed.h"
#include "quantize/cuda/dequantize/source.cuh"
#include "quantize/cuda/fp8/tile.cuh"

namespace transformer_plugin::quantize {
namespace {

__global__ void __launch_bounds__(kThreads) turn_codes_kernel(const __grid_constant__ RequantizeArgs args) {
  __shared__ TransposedTile turned;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  for_each_tile(args.to.layout, [&](const Tile& tile) {
    if (tile.rows == 0) return;
    uint32_t codes[kRowsPerThread];
    load_tile_codes(args.from, tile, warp, lane, codes);
    uint4 columns[kColsPerThread];
#pragma unroll
    for (int word = 0; word < kRowsPerThread / 4; ++word) {
      const uint32_t rows[4] = {codes[4 * word], codes[4 * word + 1], codes[4 * word + 2],
                                codes[4 * word + 3]};
      uint32_t words[4];
      turn4(rows, words);
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) (&columns[c].x)[word] = words[c];
    }
#pragma unroll
    for (int c = 0; c < kColsPerThread; ++c) turned.chunk(lane * kColsPerThread + c, warp) = columns[c];
    __syncthreads();
    store_turned(args.to, tile, warp, lane, turned);
  });
}

}  // namespace

void launch_turn_codes(const RequantizeArgs& args, void* stream) {
  const unsigned grid = block_grid(args.to.layout);
  if (grid == 0) return;
  turn_codes_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  check_launch("turn_codes_kernel");
}

void launch_requantize_transposed(const RequantizeArgs& args, void* stream) {
  const unsigned grid = block_grid(args.to.layout);
  if (grid == 0) return;
  visit_device_float(args.to.dtype, [&](auto type) {
    visit_fp8(args.to.element, [&](auto element) {
      using Source = DequantizeSource<decltype(type), decltype(element)::value>;
      quantize_kernel<Source, decltype(element)::value>
          <<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args.to, Source{args.from});
    });
  });
  check_launch("quantize_kernel");
}

}  // namespace transformer_plugin::quantize
