#include "quantize/quantize_device.cuh"

namespace transformer_plugin::quantize {
namespace {

// The amax of the whole tile, in every thread. `partial` is [kWarps] in shared memory.
template <typename T>
__device__ __forceinline__ float tile_amax(const Values<T>& values, int warp, int lane, float* partial) {
  float largest = 0.0f;
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) largest = fmaxf(largest, values.row_max(r));
  largest = warp_max(largest);
  if (lane == 0) partial[warp] = largest;
  __syncthreads();
  largest = partial[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) largest = fmaxf(largest, partial[w]);
  return largest;
}

// Row-wise codes, and the scales of the tile's rows.
template <DType element, typename T>
__device__ __forceinline__ void write_rows(const QuantizeArgs& args, const Tile& tile,
                                           const Values<T>& values, int warp, int lane, float tile_scale) {
  const int c0 = lane * kColsPerThread;
  const int first_row = warp * kRowsPerThread;
  const bool own = args.layout.mode == ScaleMode::kRows;
  float scale = tile_scale;  // of the row that this lane answers for
  using Maxima = RowMaxima<kRowsPerThread>;
  if (own) {
    Maxima maxima;
    maxima.find(values, lane);
    const float other_half = __shfl_xor_sync(0xffffffffu, maxima.at[0], kRowsPerThread);
    scale = encode_scale(fmaxf(maxima.at[0], other_half), args.rule);
    const int row = first_row + Maxima::row_of(lane);
    if (lane < kRowsPerThread && row < tile.rows) {
      args.scale[scale_index(args.layout, tile, false, row, 0)] = tile.tail ? 0.0f : 1.0f / scale;
    }
  }
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const float of_row = own ? __shfl_sync(0xffffffffu, scale, Maxima::lane_of(r)) : tile_scale;
    if (first_row + r < tile.rows) write_row<element>(args, tile, values, r, first_row + r, c0, of_row);
  }
}

// For 1x128 blocks along the transposed rows: the largest magnitude of each column over the rows of a warp, then the
// scale of each column. Ends with the scales in `scales` for every thread.
struct ColumnScales {
  alignas(16) float partial[kWarps][kTile];
  alignas(16) float scales[kTile];
};

template <typename T>
__device__ __forceinline__ void find_column_scales(const QuantizeArgs& args, const Tile& tile,
                                                   const Values<T>& values, int warp, int lane,
                                                   ColumnScales& columns) {
#pragma unroll
  for (int i = 0; i < kColsPerThread / 2; ++i) {
    *reinterpret_cast<float2*>(&columns.partial[warp][lane * kColsPerThread + 2 * i]) = values.column_max(i);
  }
  __syncthreads();
  const int column = threadIdx.x;
  if (column < kTile) {
    float largest = columns.partial[0][column];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) largest = fmaxf(largest, columns.partial[w][column]);
    const float scale = encode_scale(largest, args.rule);
    columns.scales[column] = scale;
    if (column < tile.cols) {
      args.scale_t[scale_index(args.layout, tile, true, 0, column)] = tile.tail ? 0.0f : 1.0f / scale;
    }
  }
  __syncthreads();
}

template <typename T, DType element>
__global__ void __launch_bounds__(kThreads) quantize_kernel(const __grid_constant__ QuantizeArgs args) {
  __shared__ ColumnScales columns;
  __shared__ TransposedTile turned;
  const Layout& layout = args.layout;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const Tile tile = block_tile(layout);
  if (threadIdx.x == 0 && args.rowwise) zero_scale_padding(layout, tile, false, args.scale);
  if (threadIdx.x == 0 && args.transposed) zero_scale_padding(layout, tile, true, args.scale_t);
  if (tile.rows == 0) {  // past the last group
    if (args.transposed && layout.mode == ScaleMode::kRows && threadIdx.x < tile.cols) {
      args.scale_t[scale_index(layout, tile, true, 0, threadIdx.x)] = 0.0f;
    }
    return;
  }
  Values<T> values;
  load<T>(args, tile, warp, lane, values);

  float tile_scale = 1.0f;
  if (layout.mode == ScaleMode::kTensor && !tile.tail)
    tile_scale = encode_scale(args.amax[tile.group], args.rule);
  if (layout.mode == ScaleMode::kSquare) {
    tile_scale = encode_scale(tile_amax(values, warp, lane, columns.partial[0]), args.rule);
    if (threadIdx.x == 0 && args.rowwise)
      args.scale[scale_index(layout, tile, false, 0, 0)] = 1.0f / tile_scale;
    if (threadIdx.x == 0 && args.transposed)
      args.scale_t[scale_index(layout, tile, true, 0, 0)] = 1.0f / tile_scale;
  }
  if (args.rowwise) write_rows<element>(args, tile, values, warp, lane, tile_scale);
  if (args.transposed) {
    float scales[kColsPerThread] = {tile_scale, tile_scale, tile_scale, tile_scale};
    if (layout.mode == ScaleMode::kRows) {
      find_column_scales(args, tile, values, warp, lane, columns);
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) scales[c] = columns.scales[lane * kColsPerThread + c];
    }
    write_columns<element>(args, tile, values, warp, lane, scales, turned);
  }
}

// The amax of each member or group. Floats that are not negative order like their bits, and a maximum does
// not depend on its order, so the atomics repeat bit for bit.
template <typename T>
__global__ void __launch_bounds__(kThreads) tensor_amax_kernel(const __grid_constant__ QuantizeArgs args) {
  __shared__ float partial[kWarps];
  const Tile tile = block_tile(args.layout);
  if (tile.tail || tile.rows == 0) return;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  Values<T> values;
  load<T>(args, tile, warp, lane, values);
  const float amax = tile_amax(values, warp, lane, partial);
  if (threadIdx.x == 0) {
    atomicMax(reinterpret_cast<unsigned*>(args.amax + tile.group), __float_as_uint(amax));
  }
}

__global__ void zero_amax_kernel(float* amax, int64_t count) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    amax[i] = 0.0f;
  }
}

__global__ void tensor_scales_kernel(const __grid_constant__ QuantizeArgs args) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < args.layout.tensor_scales();
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const float scale_inv = 1.0f / encode_scale(args.amax[i], args.rule);
    if (args.rowwise) args.scale[i] = scale_inv;
    if (args.transposed) args.scale_t[i] = scale_inv;
  }
}

__global__ void tile_offsets_kernel(const int32_t* offsets, int64_t groups, int32_t* tile_offsets) {
  __shared__ int32_t scan[kThreads];
  int32_t carried = 0;
  if (threadIdx.x == 0) tile_offsets[0] = 0;
  for (int64_t start = 0; start < groups; start += kThreads) {
    const int64_t g = start + threadIdx.x;
    scan[threadIdx.x] = g < groups ? static_cast<int32_t>(ceil_div(offsets[g + 1] - offsets[g], kTile)) : 0;
    __syncthreads();
    for (int distance = 1; distance < kThreads; distance *= 2) {
      const int32_t left = threadIdx.x >= distance ? scan[threadIdx.x - distance] : 0;
      __syncthreads();
      scan[threadIdx.x] += left;
      __syncthreads();
    }
    if (g < groups) tile_offsets[g + 1] = carried + scan[threadIdx.x];
    carried += scan[kThreads - 1];
    __syncthreads();
  }
}

}  // namespace

void launch_tile_offsets(const int32_t* offsets, int64_t groups, int32_t* tile_offsets, void* stream) {
  tile_offsets_kernel<<<1, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(offsets, groups, tile_offsets);
  check_launch("tile_offsets_kernel");
}

void launch_quantize(const QuantizeArgs& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const unsigned grid = tile_grid(args.layout);
  const int64_t scales = args.layout.tensor_scales();
  visit_device_float(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (args.layout.mode == ScaleMode::kTensor && scales > 0) {
      const unsigned scale_grid = grid_size(scales, kThreads);
      zero_amax_kernel<<<scale_grid, kThreads, 0, cuda_stream>>>(args.amax, scales);
      if (grid > 0) tensor_amax_kernel<T><<<grid, kThreads, 0, cuda_stream>>>(args);
      tensor_scales_kernel<<<scale_grid, kThreads, 0, cuda_stream>>>(args);
      check_launch("tensor_amax_kernel");
    }
    if (grid == 0) return;
    visit_fp8(args.element, [&](auto element) {
      quantize_kernel<T, decltype(element)::value><<<grid, kThreads, 0, cuda_stream>>>(args);
    });
  });
  check_launch("quantize_kernel");
}

}  // namespace transformer_plugin::quantize
