#include "quantize/amax.h"
#include "quantize/quantize_device.cuh"

namespace transformer_plugin::quantize {
namespace {

template <typename T>
__global__ void __launch_bounds__(kThreads) amax_kernel(const __grid_constant__ AmaxArgs args) {
  __shared__ float partial[kWarps];
  const Tile tile = block_tile(args.layout);
  if (tile.tail || tile.rows == 0) return;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  Values<T> values;
  PlainSource<T>{}.load(args, tile, warp, lane, values);
  const float amax = tile_amax(values, warp, lane, partial);
  if (threadIdx.x == 0) raise_to(args.amax + tile.group, amax);
}

__global__ void zero_amax_kernel(float* amax, int64_t count) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    amax[i] = 0.0f;
  }
}

}  // namespace

void launch_amax(const AmaxArgs& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const int64_t count = args.layout.tensor_scales();
  if (count == 0) return;
  zero_amax_kernel<<<grid_size(count, kThreads), kThreads, 0, cuda_stream>>>(args.amax, count);
  const unsigned grid = tile_grid(args.layout);
  if (grid > 0) {
    visit_device_float(args.dtype, [&](auto type) {
      amax_kernel<decltype(type)><<<grid, kThreads, 0, cuda_stream>>>(args);
    });
  }
  check_launch("amax_kernel");
}

}  // namespace transformer_plugin::quantize
