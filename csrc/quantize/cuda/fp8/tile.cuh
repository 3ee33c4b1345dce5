// The FP8 tile kernel: quantizes a matrix with FP32 scales per tensor, of 1x128 blocks or of 128x128 blocks.
//
//   data[row][column] = fp8(x * scale),  data_t[column][row] = fp8(x * scale_t),  stored scales are 1 / scale
// Input: [matrices, rows, cols] in BF16, FP16 or FP32, or the values that a source computes. Output layouts:
// quantize/args/layout.h.
//
// Grid: block_grid(layout) blocks of 256 threads; a block loops over tiles of 128x128 (one, or up to two of a
// ragged matrix). Warp w holds rows 16w .. 16w + 15 of the tile in registers, lane l columns 4l .. 4l + 3.
// Row-wise data is stored from registers; transposed data goes through shared memory so that a warp stores
// whole rows of it.
// Shared memory (Fp8Shared): maxima and scales of columns, and the transposed tile of bytes.
#pragma once

#include "quantize/cuda/tile/common.cuh"

namespace transformer_plugin::quantize {

// Row-wise data, and the scales of the tile's rows.
template <DType element, typename T>
__device__ __forceinline__ void write_rows(const QuantizeArgs& args, const Tile& tile,
                                           const TileFragment<T>& values, int warp, int lane,
                                           float tile_scale) {
  const int first_row = warp * kRowsPerThread;
  const bool own = args.layout.granularity == ScaleGranularity::k1x128;
  float scale = tile_scale;  // of the row that this lane holds
  using Maxima = RowMaxima<kRowsPerThread, T>;
  if (own) {
    Maxima maxima;
    maxima.find(values, lane);
    const float own_half = maxima.amax(0),
                other_half = __shfl_xor_sync(0xffffffffu, own_half, kRowsPerThread);
    scale = encode_scale(fmaxf(own_half, other_half), args.rule);
    const int row = first_row + Maxima::first_of(lane);
    if (lane < kRowsPerThread && row < tile.rows) {
      args.scale[scale_index(args.layout, tile, false, row, 0)] = tile.tail ? 0.0f : 1.0f / scale;
    }
  }
  const auto write = [&](auto scale_of) {
    store_encoded_rows<element>(args, tile, values, first_row, lane, scale_of);
  };
  if (own) {
    write([&](int r) { return __shfl_sync(0xffffffffu, scale, Maxima::lane_of(r)); });
  } else {
    write([&](int) { return tile_scale; });
  }
}

// For 1x128 blocks of transposed data: the maximum of each column over the rows of each warp, then the scale
// of each column.
struct ColumnScales {
  alignas(16) float partial[kWarps][kTile];
  alignas(16) float scales[kTile];
};

template <typename T>
__device__ __forceinline__ void find_column_scales(const QuantizeArgs& args, const Tile& tile,
                                                   const TileFragment<T>& values, int warp, int lane,
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

// Shared memory for one tile.
struct Fp8Shared {
  ColumnScales columns;
  TransposedTile transposed_tile;
};

// Stores data and scales of a tile in the requested directions. Called by all threads of the block.
template <DType element, typename T>
__device__ __forceinline__ void write_tile(const QuantizeArgs& args, const Tile& tile,
                                           const TileFragment<T>& values, int warp, int lane,
                                           Fp8Shared& shared) {
  const Layout& layout = args.layout;
  float tile_scale = 1.0f;
  if (layout.granularity == ScaleGranularity::kPerTensor && !tile.tail)
    tile_scale = tensor_scale(args, tile.group);
  float amax = 0.0f;
  if (layout.granularity == ScaleGranularity::k128x128 || args.amax_out) {
    amax = tile_amax(values, warp, lane, shared.columns.partial[0]);
  }
  if (args.amax_out && threadIdx.x == 0 && !tile.tail) atomic_max(args.amax_out + tile.group, amax);
  if (layout.granularity == ScaleGranularity::k128x128) {
    tile_scale = encode_scale(amax, args.rule);
    if (threadIdx.x == 0 && args.rowwise)
      args.scale[scale_index(layout, tile, false, 0, 0)] = 1.0f / tile_scale;
    if (threadIdx.x == 0 && args.transposed)
      args.scale_t[scale_index(layout, tile, true, 0, 0)] = 1.0f / tile_scale;
  }
  if (args.rowwise) write_rows<element>(args, tile, values, warp, lane, tile_scale);
  if (args.transposed) {
    float scales[kColsPerThread] = {tile_scale, tile_scale, tile_scale, tile_scale};
    if (layout.granularity == ScaleGranularity::k1x128) {
      find_column_scales(args, tile, values, warp, lane, shared.columns);
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) scales[c] = shared.columns.scales[lane * kColsPerThread + c];
    }
    write_columns<element>(args, tile, values, warp, lane, scales, shared.transposed_tile);
  }
}

// Stores the inverse per-tensor scales, distributed over the grid, including those of matrices or groups
// without a tile. A separate launch is needed only if there is no tile at all.
__device__ __forceinline__ void store_tensor_scales(const QuantizeArgs& args) {
  if (args.layout.granularity != ScaleGranularity::kPerTensor || args.is_noop()) return;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < args.layout.tensor_scales();
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const float scale_inv = 1.0f / tensor_scale(args, i);
    if (args.rowwise) args.scale[i] = scale_inv;
    if (args.transposed) args.scale_t[i] = scale_inv;
  }
}

// Zeroes the padding of scales, and the scales of a tile after the last row tile in use. Returns whether the
// tile holds rows.
__device__ __forceinline__ bool begin_tile(const QuantizeArgs& args, const Tile& tile) {
  const Layout& layout = args.layout;
  if (args.is_noop()) return false;
  if (threadIdx.x == 0 && args.rowwise) zero_scale_padding(layout, tile, false, args.scale);
  if (threadIdx.x == 0 && args.transposed) zero_scale_padding(layout, tile, true, args.scale_t);
  if (tile.rows > 0) return true;
  if (args.transposed && layout.granularity == ScaleGranularity::k1x128 && threadIdx.x < tile.cols) {
    args.scale_t[scale_index(layout, tile, true, 0, threadIdx.x)] = 0.0f;
  }
  return false;
}

// The functions above as a type, for kernels that are templates over the format.
template <DType element>
struct Fp8TileOps {
  using Args = QuantizeArgs;
  using Shared = Fp8Shared;
  // Once, by every block.
  static __device__ __forceinline__ void store_whole_scales(const QuantizeArgs& args) {
    store_tensor_scales(args);
  }
  static __device__ __forceinline__ bool begin(const QuantizeArgs& args, const Tile& tile) {
    return begin_tile(args, tile);
  }
  template <typename T>
  static __device__ __forceinline__ void write(const QuantizeArgs& args, const Tile& tile,
                                               const TileFragment<T>& values, int warp, int lane,
                                               Shared& shared) {
    write_tile<element>(args, tile, values, warp, lane, shared);
  }
};

template <typename Source, DType element>
__global__ void __launch_bounds__(kThreads, Source::kBlocks)
    quantize_kernel(const __grid_constant__ QuantizeArgs args, const __grid_constant__ Source source) {
  pdl_wait();
  __shared__ Fp8Shared shared;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  for_each_tile(args.layout, [&](const Tile& tile) {
    if (!begin_tile(args, tile)) return;
    TileFragment<typename Source::Value> values;
    source.load(args, tile, warp, lane, values);
    write_tile<element>(args, tile, values, warp, lane, shared);
  });
  store_tensor_scales(args);
}

}  // namespace transformer_plugin::quantize
