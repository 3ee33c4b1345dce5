// The backward of an activation with a gate, quantized, for any dtype and alignment (activation_backward_stream.cuh is the faster
// kernel for 16-bit values):
//
//   gradients of gate and linear part (activation/functions.h), rounded to the input's dtype,
//   then quantized in both directions
// Input: grad [rows, F], input [rows, 2F]. Grid: block_grid of the [rows, F] layout, 256 threads. A block
// computes the gradients of 128x128 features and stores two tiles: the gate's, and the linear part's, which
// each thread keeps in shared memory until the first tile is stored. Row sums for the gradient of the
// probability go to `partial`.
#pragma once

#include "common/shared_memory.cuh"
#include "quantize/cuda/fused/activation_backward_stream.cuh"
#include "quantize/cuda/fused/activation_backward_tile.cuh"

namespace transformer_plugin::quantize {

template <typename T, typename TileOps>
struct BackwardShared {
  typename TileOps::Shared tile;
  Vector4<T> linear[kRowsPerThread][kThreads];
};

template <typename T, typename Function, typename TileOps>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 2 : 1)
    activation_backward_quantize_kernel(const __grid_constant__ typename TileOps::Args args,
                                        const __grid_constant__ ActivationBackwardArgs backward,
                                        Function function) {
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<BackwardShared<T, TileOps>*>(memory);
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  TileOps::store_whole_scales(args);
  for_each_tile(half_of(args.layout), [&](Tile tile) {
    const Tile second = linear_tile(tile, backward.features);
    TileOps::begin(args, second);
    if (!TileOps::begin(args, tile)) return;
    TileFragment<T> values;
    activation::for_each_gradient<T, kRowsInFlight<T> / 2>(function, backward, tile, warp, lane,
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

template <typename T, typename TileOps, typename Function>
void launch_activation_backward_tiles(const typename TileOps::Args& args,
                                      const ActivationBackwardArgs& backward, Function function,
                                      unsigned grid, cudaStream_t stream) {
  const auto kernel = activation_backward_quantize_kernel<T, Function, TileOps>;
  constexpr int bytes = sizeof(BackwardShared<T, TileOps>);
  static DynamicSharedMemory memory;
  memory.allow(kernel, bytes);
  kernel<<<grid, kThreads, bytes, stream>>>(args, backward, function);
  check_launch("activation_backward_quantize_kernel");
}

// For FP8. `Stream` is the row-streaming form of the format.
template <template <DType> typename TileOps, typename Stream>
void launch_activation_backward_fp8(const QuantizeArgs& args, const ActivationBackwardArgs& backward,
                                    void* stream) {
  const unsigned grid = block_grid(half_of(args.layout));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  activation::visit_quantized_function(backward.activation, [&](auto function) {
    if (grid > 0 && can_stream(args, backward.grad, backward.input)) {
      launch_backward_stream<Stream>(args, backward, function, grid, cuda_stream);
    } else if (grid > 0) {
      visit_float_fp8(args.dtype, args.element, [&](auto type, auto element) {
        using Tile = TileOps<decltype(element)::value>;
        launch_activation_backward_tiles<decltype(type), Tile>(args, backward, function, grid, cuda_stream);
      });
    }
  });
  if (backward.grad_probs) activation::launch_add_row_sums(backward, stream);
}

}  // namespace transformer_plugin::quantize
