// The amax ops (quantize/args/amax.h): input [matrices, rows, cols] in BF16, FP16 or FP32.
//
// Grid: block_grid(layout) blocks of 256 threads; a block loops over tiles of 128x128. Warp w holds rows 16w
// .. 16w + 15, lane l columns 4l .. 4l + 3. Maxima of a tile are reduced by shuffles and one partial maximum
// per warp in shared memory, then combined by atomics, which zero_amax_kernel prepares.
#include "common/row_index.cuh"
#include "quantize/args/amax.h"
#include "quantize/cuda/nvfp4/hadamard.cuh"

namespace transformer_plugin::quantize {
namespace {

// The maximum over all threads of the block, in every thread. `partial` is [kWarps] in shared memory.
__device__ __forceinline__ float block_max(float value, int warp, int lane, float* partial) {
  value = warp_max(value);
  __syncthreads();
  if (lane == 0) partial[warp] = value;
  __syncthreads();
  float largest = partial[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) largest = fmaxf(largest, partial[w]);
  return largest;
}

// One amax per row of the tile.
template <typename T>
__device__ __forceinline__ void update_row_amax(const AmaxArgs& args, const Tile& tile,
                                                const TileFragment<T>& values, int warp, int lane) {
  using Maxima = RowMaxima<kRowsPerThread, T>;
  Maxima maxima;
  maxima.find(values, lane);
  const float own_half = maxima.amax(0), other_half = __shfl_xor_sync(0xffffffffu, own_half, kRowsPerThread);
  const int row = warp * kRowsPerThread + Maxima::first_of(lane);
  if (lane < kRowsPerThread && row < tile.rows) {
    atomic_max(args.amax + tile.matrix * args.layout.rows + tile.row + row, fmaxf(own_half, other_half));
  }
}

// One amax per column, from this warp's rows.
template <typename T>
__device__ __forceinline__ void update_column_amax(const AmaxArgs& args, const Tile& tile,
                                                   const TileFragment<T>& values, int lane) {
  float* target = args.amax_t + tile.group * args.layout.cols + tile.col;
#pragma unroll
  for (int i = 0; i < kColsPerThread / 2; ++i) {
    const float2 largest = values.column_max(i);
    const int column = lane * kColsPerThread + 2 * i;
    if (column < tile.cols) atomic_max(target + column, largest.x);
    if (column + 1 < tile.cols) atomic_max(target + column + 1, largest.y);
  }
}

// One amax for the tile.
__device__ __forceinline__ void put(const AmaxArgs& args, float* target, float amax) {
  if (threadIdx.x != 0) return;
  if (args.one_tile_each()) {
    *target = amax;
  } else {
    atomic_max(target, amax);
  }
}

// The maximum of a thread's magnitudes after the random Hadamard transform of its columns.
template <typename T>
__device__ __forceinline__ float transformed_max(const TileFragment<T>& values) {
  float largest = 0.0f;
#pragma unroll
  for (int c = 0; c < kColsPerThread; ++c) {
    float x[kNvBlock];
#pragma unroll
    for (int r = 0; r < kNvBlock; ++r) x[r] = values.get(r, c);
    NvPairs<T> pairs;
    transform<T>(x, pairs);
    Packed2<T> most = zeros<T>();
#pragma unroll
    for (int i = 0; i < kNvBlock / 2; ++i) most = max_abs(most, pairs[i]);
    const float2 two = to_floats(most);
    largest = fmaxf(largest, fmaxf(two.x, two.y));
  }
  return largest;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) amax_kernel(const __grid_constant__ AmaxArgs args) {
  __shared__ float partial[kWarps];
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  for_each_tile(args.layout, [&](const Tile& tile) {
    if (tile.tail || tile.rows == 0) return;
    TileFragment<T> values;
    PlainSource<T>{}.load(args, tile, warp, lane, values);
    if (args.row_scaled) {
      if (args.amax) update_row_amax(args, tile, values, warp, lane);
      if (args.amax_t) update_column_amax(args, tile, values, lane);
      return;
    }
    if (args.amax) {
      const float amax = tile_amax(values, warp, lane, partial);
      put(args, args.amax + tile.group, amax);
    }
    if (args.amax_t) {  // requested together with `amax` only if the two differ
      const float largest = is_block(tile, warp) ? transformed_max(values) : 0.0f;
      const float amax = block_max(largest, warp, lane, partial);
      put(args, args.amax_t + tile.group, amax);
    }
  });
}

// Zeroes both arrays, `count` and `count_t` elements.
__global__ void zero_amax_kernel(float* amax, int64_t count, float* amax_t, int64_t count_t) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < count + count_t;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    (i < count ? amax[i] : amax_t[i - count]) = 0.0f;
  }
}

void zero(float* amax, int64_t count, float* amax_t, int64_t count_t, cudaStream_t stream) {
  if (count + count_t == 0) return;
  zero_amax_kernel<<<grid_size(count + count_t, kThreads), kThreads, 0, stream>>>(amax, count, amax_t,
                                                                                  count_t);
  check_launch("zero_amax_kernel");
}

// amax[group] = the largest of the amaxes of the group's rows. Grid-stride loop, one warp per row tile.
__global__ void __launch_bounds__(kThreads)
    indexed_amax_kernel(const __grid_constant__ IndexedAmaxArgs args) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const RowTile* table = args.layout.row_tile_table;
  const int used = table[0].used_row_tiles, step = static_cast<int>(gridDim.x) * kWarps;
  for (int index = static_cast<int>(blockIdx.x) * kWarps + warp; index < used; index += step) {
    const RowTile& tile = table[index];
    if (tile.group == args.layout.groups) return;  // the tail comes last
    float largest = 0.0f;
    for (int r = lane; r < tile.rows; r += kWarpSize) {
      const int64_t row = entry(args.index, tile.row + r);
      if (is_inside(args.index, row)) largest = fmaxf(largest, args.row_amax[row]);
    }
    largest = warp_max(largest);
    if (lane == 0) atomic_max(args.amax + tile.group, largest);
  }
}

}  // namespace

void launch_amax(const AmaxArgs& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (!args.one_tile_each()) {
    zero(args.amax, args.amax ? args.count() : 0, args.amax_t, args.amax_t ? args.count_t() : 0, cuda_stream);
  }
  const unsigned grid = block_grid(args.layout);
  if (grid == 0) return;
  visit_device_float(
      args.dtype, [&](auto type) { amax_kernel<decltype(type)><<<grid, kThreads, 0, cuda_stream>>>(args); });
  check_launch("amax_kernel");
}

void launch_indexed_amax(const IndexedAmaxArgs& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  zero(args.amax, args.layout.groups, nullptr, 0, cuda_stream);
  const int64_t row_tiles = args.layout.row_tiles();
  if (row_tiles == 0) return;
  indexed_amax_kernel<<<grid_size(row_tiles, kWarps), kThreads, 0, cuda_stream>>>(args);
  check_launch("indexed_amax_kernel");
}

}  // namespace transformer_plugin::quantize
