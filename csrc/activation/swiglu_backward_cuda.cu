#include "activation/swiglu_backward_tile.cuh"

namespace transformer_plugin::activation {
namespace {

using quantize::Layout;

template <typename T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 2 : 1)
    swiglu_backward_kernel(const __grid_constant__ SwigluBackwardArgs args,
                           const __grid_constant__ Layout layout) {
  wait_for_the_kernel_before();
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const Tile tile = quantize::block_tile(layout);
  const int64_t f = args.features;
  const int rows = tile.rows - warp * kRowsPerThread;
  const int count = tile.cols - lane * kColsPerThread;
  const bool vectors = tile.cols == quantize::kTile && f % kColsPerThread == 0;
  T* target = static_cast<T*>(args.grad_input) + (tile.row + warp * kRowsPerThread) * 2 * f + tile.col +
              lane * kColsPerThread;
  for_each_gradient<T, quantize::kRowsUnderWay<T>>(
      args, tile, warp, lane, [&](int r, Vector4<T> gate, Vector4<T> linear) {
        if (r >= rows) return;
        quantize::store4(target + r * 2 * f, gate, count, vectors);
        quantize::store4(target + r * 2 * f + f, linear, count, vectors);
      });
}

__global__ void add_row_sums_kernel(const float* partial, int64_t tiles, int64_t rows, float* sums) {
  constexpr int kAhead = 16;  // loads under way
  wait_for_the_kernel_before();
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < rows;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    float sum = 0.0f;
#pragma unroll kAhead
    for (int64_t t = 0; t < tiles; ++t) sum = sum + partial[t * rows + i];
    sums[i] = sum;
  }
}

}  // namespace

void launch_add_row_sums(const SwigluBackwardArgs& args, void* stream) {
  if (args.rows == 0 || args.partial == args.grad_probs) return;
  launch_early(add_row_sums_kernel, grid_size(args.rows, kThreads), kThreads, 0,
               static_cast<cudaStream_t>(stream), args.partial, quantize::ceil_div(args.features, kSumTile),
               args.rows, args.grad_probs);
  check_launch("add_row_sums_kernel");
}

void launch_swiglu_backward(const SwigluBackwardArgs& args, void* stream) {
  Layout layout = {};
  layout.members = 1;
  layout.rows = args.rows;
  layout.cols = args.features;
  const unsigned grid = quantize::tile_grid(layout);
  if (grid > 0) {
    visit_device_float(args.dtype, [&](auto element) {
      using T = decltype(element);
      launch_early(swiglu_backward_kernel<T>, grid, kThreads, 0, static_cast<cudaStream_t>(stream), args,
                   layout);
    });
    check_launch("swiglu_backward_kernel");
  }
  if (args.grad_probs) launch_add_row_sums(args, stream);
}

}  // namespace transformer_plugin::activation
