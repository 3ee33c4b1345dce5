// The backward of SwiGLU, quantized, for any dtype and alignment (swiglu_backward_stream.cuh is the faster
// kernel for 16-bit values):
//
//   gradients of gate and linear part (activation/swiglu.h), rounded to the input's dtype,
//   then quantized in both directions
// Input: grad [rows, F], input [rows, 2F]. Grid: block_grid of the [rows, F] layout, 256 threads. A block
// computes the gradients of 128x128 features and stores two tiles: the gate's, and the linear part's, which
// each thread keeps in shared memory until the first tile is stored. Row sums for the gradient of the
// probability go to `partial`.
#pragma once

#include "common/shared_memory.cuh"
#include "quantize/cuda/fused/swiglu_backward_stream.cuh"
#include "quantize/cuda/fused/swiglu_backward_tile.cuh"

namespace transformer_plugin::quantize {

template <typename T, typename TileOps>
struct BackwardShared {
  typename TileOps::Shared tile;
  Vector4<T> linear[kRowsPerThread][kThreads];
};

template <typename T, typename TileOps>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 2 : 1)
    swiglu_backward_quantize_kernel(const __grid_constant__ typename TileOps::Args args,
                                    const __grid_constant__ SwigluBackwardArgs swiglu) {
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<BackwardShared<T, TileOps>*>(memory);
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  TileOps::store_whole_scales(args);
  for_each_tile(half_of(args.layout), [&](Tile tile) {
    const Tile second = linear_tile(tile, swiglu.features);
    TileOps::begin(args, second);
    if (!TileOps::begin(args, tile)) return;
    TileFragment<T> values;
    activation::for_each_gradient<T, kRowsInFlight<T> / 2>(swiglu, tile, warp, lane,
                                                           [&](int r, Vector4<T> gate, Vector4<T> linear) {
                                                             memcpy(values.at[r], &gate, sizeof(gate));
                                                             shared.linear[r][threadIdx.x] = linear;
                                                           });
#pragma unroll 1
    for (int half = 0;; ++half) {
      TileOps::write(args, tile, values, warp, lane, shared.tile);
      if (half == 1) return;
      tile = second;
#pragma unroll
      for (int r = 0; r < kRowsPerThread; ++r) {
        memcpy(values.at[r], &shared.linear[r][threadIdx.x], sizeof(Vector4<T>));
      }
      __syncthreads();  // the first tile's shared memory may be overwritten
    }
  });
}

template <typename T, typename TileOps>
void launch_swiglu_backward_tiles(const typename TileOps::Args& args, const SwigluBackwardArgs& swiglu,
                                  unsigned grid, cudaStream_t stream) {
  const auto kernel = swiglu_backward_quantize_kernel<T, TileOps>;
  constexpr int bytes = sizeof(BackwardShared<T, TileOps>);
  static DynamicSharedMemory memory;
  memory.allow(kernel, bytes);
  kernel<<<grid, kThreads, bytes, stream>>>(args, swiglu);
  check_launch("swiglu_backward_quantize_kernel");
}

// For FP8. `Stream` is the row-streaming form of the format.
template <template <DType> typename TileOps, typename Stream>
void launch_swiglu_backward_fp8(const QuantizeArgs& args, const SwigluBackwardArgs& swiglu, void* stream) {
  const unsigned grid = block_grid(half_of(args.layout));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (grid > 0 && can_stream(args, swiglu.grad, swiglu.input)) {
    launch_backward_stream<Stream>(args, swiglu, grid, cuda_stream);
  } else if (grid > 0) {
    visit_float_fp8(args.dtype, args.element, [&](auto type, auto element) {
      launch_swiglu_backward_tiles<decltype(type), TileOps<decltype(element)::value>>(args, swiglu, grid,
                                                                                      cuda_stream);
    });
  }
  if (swiglu.grad_probs) activation::launch_add_row_sums(swiglu, stream);
}

}  // namespace transformer_plugin::quantize
