// The backward of SwiGLU, quantized: a block computes the gradients of 128x128 features and stores two tiles, of the
// gate's gradient and of the linear part's. The second waits in shared memory, each thread for its own part.
#pragma once

#include "common/shared_memory.cuh"
#include "quantize/cuda/fused/swiglu_backward_stream.cuh"
#include "quantize/cuda/fused/swiglu_backward_tile.cuh"

namespace transformer_plugin::quantize {

template <typename T, typename Family>
struct BackwardShared {
  typename Family::Shared tile;
  Vector4<T> linear[kRowsPerThread][kThreads];
};

template <typename T, typename Family>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 2 : 1)
    swiglu_backward_quantize_kernel(const __grid_constant__ typename Family::Args args,
                                    const __grid_constant__ SwigluBackwardArgs swiglu) {
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<BackwardShared<T, Family>*>(memory);
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  for_each_tile(half_of(args.layout), [&](Tile tile) {
    const Tile second = linear_tile(tile, swiglu.features);
    Family::begin(args, second);
    if (!Family::begin(args, tile)) return;
    Values<T> values;
    activation::for_each_gradient<T, kRowsUnderWay<T> / 2>(swiglu, tile, warp, lane,
                                                           [&](int r, Vector4<T> gate, Vector4<T> linear) {
                                                             memcpy(values.at[r], &gate, sizeof(gate));
                                                             shared.linear[r][threadIdx.x] = linear;
                                                           });
#pragma unroll 1
    for (int half = 0;; ++half) {
      Family::write(args, tile, values, warp, lane, shared.tile);
      if (half == 1) return;
      tile = second;
#pragma unroll
      for (int r = 0; r < kRowsPerThread; ++r) {
        memcpy(values.at[r], &shared.linear[r][threadIdx.x], sizeof(Vector4<T>));
      }
      __syncthreads();  // the first tile has left shared memory
    }
  });
}

template <typename T, typename Family>
void launch_backward_as(const typename Family::Args& args, const SwigluBackwardArgs& swiglu, unsigned grid,
                        cudaStream_t stream) {
  const auto kernel = swiglu_backward_quantize_kernel<T, Family>;
  constexpr int bytes = sizeof(BackwardShared<T, Family>);
  static DynamicSharedMemory memory;
  memory.allow(kernel, bytes);
  kernel<<<grid, kThreads, bytes, stream>>>(args, swiglu);
  check_launch("swiglu_backward_quantize_kernel");
}

// In FP8. `Stream` is the form of the family for rows that stream.
template <template <DType> typename Family, typename Stream>
void launch_backward(const QuantizeArgs& args, const SwigluBackwardArgs& swiglu, void* stream) {
  const unsigned grid = block_grid(half_of(args.layout));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (grid > 0 && can_stream(args, swiglu.grad, swiglu.input)) {
    launch_backward_stream<Stream>(args, swiglu, grid, cuda_stream);
  } else if (grid > 0) {
    visit_device_float(args.dtype, [&](auto type) {
      visit_fp8(args.element, [&](auto element) {
        launch_backward_as<decltype(type), Family<decltype(element)::value>>(args, swiglu, grid, cuda_stream);
      });
    });
  }
  if (swiglu.grad_probs) activation::launch_add_row_sums(swiglu, stream);
}

}  // namespace transformer_plugin::quantize
