#include "common/scan.cuh"
#include "quantize/fp8_tile.cuh"

namespace transformer_plugin::quantize {
namespace {

__global__ void tensor_scales_kernel(const __grid_constant__ QuantizeArgs args) {
  if (args.is_noop()) return;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < args.layout.tensor_scales();
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const float scale_inv = 1.0f / tensor_scale(args, i);
    if (args.rowwise) args.scale[i] = scale_inv;
    if (args.transposed) args.scale_t[i] = scale_inv;
  }
}

// One block: each pass of the first loop scans the tiles of kThreads groups, then threads look tiles up.
__global__ void __launch_bounds__(kThreads)
    row_tiles_kernel(const int32_t* offsets, int64_t groups, int64_t rows, int64_t row_tiles,
                     int32_t* tile_offsets, RowTile* table) {
  __shared__ BlockScan<int32_t, kThreads> scan;
  int32_t carried = 0;
  if (threadIdx.x == 0) tile_offsets[0] = 0;
  for (int64_t start = 0; start < groups; start += kThreads) {
    const int64_t g = start + threadIdx.x;
    const int32_t tiles = g < groups ? static_cast<int32_t>(ceil_div(offsets[g + 1] - offsets[g], kTile)) : 0;
    int32_t total;
    const int32_t end = carried + scan.inclusive(tiles, total);
    if (g < groups) tile_offsets[g + 1] = end;
    carried += total;
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; i < row_tiles; i += kThreads) {
    table[i] = row_tile_at(offsets, tile_offsets, groups, rows, i);
  }
}

}  // namespace

void launch_row_tiles(const int32_t* offsets, int64_t groups, int64_t rows, int64_t row_tiles,
                      int32_t* tile_offsets, RowTile* table, void* stream) {
  row_tiles_kernel<<<1, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(offsets, groups, rows, row_tiles,
                                                                          tile_offsets, table);
  check_launch("row_tiles_kernel");
}

void launch_quantize(const QuantizeArgs& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const unsigned grid = tile_grid(args.layout);
  const int64_t scales = args.layout.tensor_scales();
  visit_device_float(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (args.layout.mode == ScaleMode::kTensor && scales > 0) {
      tensor_scales_kernel<<<grid_size(scales, kThreads), kThreads, 0, cuda_stream>>>(args);
      check_launch("tensor_scales_kernel");
    }
    if (grid == 0) return;
    visit_fp8(args.element, [&](auto element) {
      using Source = PlainSource<T>;
      quantize_kernel<Source, decltype(element)::value><<<grid, kThreads, 0, cuda_stream>>>(args, Source{});
    });
  });
  check_launch("quantize_kernel");
}

}  // namespace transformer_plugin::quantize
