// The MXFP8 tile kernel: quantizes a matrix with E8M0 scales of 1x32 or 32x32 blocks.
//
//   data[row][column] = fp8(x * 2^(127 - e)),  data_t[column][row] with the exponent of the column's block
// Input: [matrices, rows, cols] in BF16, FP16 or FP32, or the values that a source computes. Output layouts:
// quantize/args/layout.h. The tail of a ragged matrix needs no special case: its values are loaded as zero,
// whose exponent is 0.
//
// Grid, block and division of work are those of fp8/tile.cuh. Shared memory (MxShared): maxima of columns and
// of 32x32 blocks, exponents of columns, and the transposed tile of bytes.
#pragma once

#include "quantize/cuda/tile/common.cuh"

namespace transformer_plugin::quantize {

inline constexpr int kLanesPerBlock = kMxBlock / kColsPerThread;
inline constexpr int kWarpsPerBlock = kMxBlock / kRowsPerThread;
static_assert(kWarpsPerBlock == 2 && kLanesPerBlock == 8, "a 32x32 block is 2 warps of 8 lanes");

// The maximum over the 8 lanes whose columns form one block, in each of them.
__device__ __forceinline__ float block_max(float value) {
#pragma unroll
  for (int distance = kLanesPerBlock / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

// `largest_fp8` is a constant, so that the compiler multiplies by its reciprocal.
template <DType element>
__device__ __forceinline__ uint8_t exponent_of(float amax) {
  return e8m0_of_amax(amax, largest_fp8<element>());
}

// The exponent of a block, shifted to its position in a float's bits: e8m0_of_amax without branches, for an
// amax that is not NaN.
template <DType element>
__device__ __forceinline__ uint32_t quick_e8m0_bits(float amax) {
  const uint32_t bits = float_to_bits(amax * (1.0f / largest_fp8<element>()));
  const uint32_t up = bits > 0x400000u ? bits + 0x7fffffu : 0u;  // 2^-127 is 0x400000
  return min(up & 0x7f800000u, 0x7f000000u);                     // infinity counts as the largest
}
// e8m0_multiplier of such bits.
__device__ __forceinline__ float quick_e8m0_multiplier(uint32_t bits) {
  return bits_to_float(max(0x7f000000u - bits, 0x00400000u));
}

// Partial maxima: of each column over the rows of a warp, and of each warp's part of a 32x32 block.
struct MxPartial {
  alignas(16) float of_columns[kWarps][kTile];
  float of_squares[kWarps][kMxBlocksPerRow];

  __device__ __forceinline__ float column(int row_block, int column) const {
    return fmaxf(of_columns[2 * row_block][column], of_columns[2 * row_block + 1][column]);
  }
  __device__ __forceinline__ float square(int row_block, int column_block) const {
    return fmaxf(of_squares[2 * row_block][column_block], of_squares[2 * row_block + 1][column_block]);
  }
};

template <typename T>
__device__ __forceinline__ void find_partial(const TileFragment<T>& values, int warp, int lane,
                                             MxPartial& partial) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kColsPerThread / 2; ++i) {
    const float2 of_columns = values.column_max(i);
    *reinterpret_cast<float2*>(&partial.of_columns[warp][lane * kColsPerThread + 2 * i]) = of_columns;
    largest = fmaxf(largest, fmaxf(of_columns.x, of_columns.y));
  }
  largest = block_max(largest);
  if (lane % kLanesPerBlock == 0) partial.of_squares[warp][lane / kLanesPerBlock] = largest;
}

// A lane holds the maxima of two rows of its block.
template <DType element, typename T>
__device__ __forceinline__ void write_mx_rows(const QuantizeArgs& args, const Tile& tile,
                                              const TileFragment<T>& values, int warp, int lane,
                                              const MxPartial& partial) {
  const Layout& layout = args.layout;
  const int block = lane / kLanesPerBlock;
  const int first_row = warp * kRowsPerThread;
  using Maxima = RowMaxima<kLanesPerBlock, T>;
  float multipliers[Maxima::kCount];
  Maxima maxima;
  if (!layout.square) maxima.find(values, lane);
  const ScaleWords scale_words(layout, tile, false);
#pragma unroll
  for (int i = 0; i < Maxima::kCount; ++i) {
    const float amax = layout.square ? partial.square(warp / kWarpsPerBlock, block) : maxima.amax(i);
    const uint8_t exponent = exponent_of<element>(amax);
    multipliers[i] = e8m0_multiplier(exponent);
    uint32_t word = static_cast<uint32_t>(exponent) << (8 * block);
    word |= __shfl_xor_sync(0xffffffffu, word, kLanesPerBlock);
    word |= __shfl_xor_sync(0xffffffffu, word, 2 * kLanesPerBlock);
    const int row = first_row + Maxima::first_of(lane) + i;
    if (lane < kLanesPerBlock && row < tile.rows) {
      store_evict_last(args.exponents + scale_words.at(row), word);
    }
  }
  store_encoded_rows<element>(args, tile, values, first_row, lane, [&](int r) {
    const int holder = block * kLanesPerBlock + Maxima::lane_of(r);
    return __shfl_sync(0xffffffffu, multipliers[r % Maxima::kCount], holder);
  });
}

// Exponents of the blocks of columns, [row block][column].
struct ColumnExponents {
  alignas(4) uint8_t at[kMxBlocksPerRow][kTile];
};

// Each thread computes its share of the exponents; thread c stores the word of column c.
template <DType element>
__device__ __forceinline__ void find_column_exponents(bool square, const MxPartial& partial,
                                                      ColumnExponents& exponents) {
#pragma unroll
  for (int i = 0; i < kMxBlocksPerRow * kTile / kThreads; ++i) {
    const int row_block = (i * kThreads + threadIdx.x) / kTile, column = threadIdx.x % kTile;
    const float amax =
        square ? partial.square(row_block, column / kMxBlock) : partial.column(row_block, column);
    exponents.at[row_block][column] = exponent_of<element>(amax);
  }
}

__device__ __forceinline__ void write_column_exponents(const QuantizeArgs& args, const Tile& tile,
                                                       const ColumnExponents& exponents) {
  const int column = threadIdx.x;
  if (column >= tile.cols) return;
  Bytes4 word;
#pragma unroll
  for (int b = 0; b < kMxBlocksPerRow; ++b) word.set(b, exponents.at[b][column]);
  store_evict_last(args.exponents_t + ScaleWords(args.layout, tile, true).at(column), word.word);
}

// Shared memory for one tile.
struct MxShared {
  MxPartial partial;
  ColumnExponents exponents;
  TransposedTile transposed_tile;
};

// Stores data and scales of a tile in the requested directions. Called by all threads of the block.
template <DType element, typename T>
__device__ __forceinline__ void write_mx_tile(const QuantizeArgs& args, const Tile& tile,
                                              const TileFragment<T>& values, int warp, int lane,
                                              MxShared& shared) {
  const Layout& layout = args.layout;
  const MxPartial& partial = shared.partial;
  if (args.transposed || layout.square) {
    find_partial(values, warp, lane, shared.partial);
    __syncthreads();
  }
  if (args.transposed) find_column_exponents<element>(layout.square, partial, shared.exponents);
  const bool holds_rows = warp * kRowsPerThread < tile.rows;
  if (args.rowwise && holds_rows) write_mx_rows<element>(args, tile, values, warp, lane, partial);
  if (args.transposed) {
    __syncthreads();
    const uint32_t of_columns = *reinterpret_cast<const uint32_t*>(
        &shared.exponents.at[warp / kWarpsPerBlock][lane * kColsPerThread]);
    float scales[kColsPerThread];
#pragma unroll
    for (int c = 0; c < kColsPerThread; ++c) {
      scales[c] = e8m0_multiplier(static_cast<uint8_t>(of_columns >> (8 * c)));
    }
    write_column_exponents(args, tile, shared.exponents);
    write_columns<element, false>(args, tile, values, warp, lane, scales, shared.transposed_tile);
  }
}

// Zeroes the padding of scales, and the scales of a tile after the last row tile in use. Returns whether the
// tile holds rows.
__device__ __forceinline__ bool begin_mx_tile(const QuantizeArgs& args, const Tile& tile) {
  const Layout& layout = args.layout;
  if (args.is_noop()) return false;
  if (threadIdx.x == 0 && args.rowwise) zero_word_padding(layout, tile, false, args.exponents);
  if (threadIdx.x == 0 && args.transposed) zero_word_padding(layout, tile, true, args.exponents_t);
  if (tile.rows > 0) return true;
  if (args.transposed) zero_unused_words(layout, tile, args.exponents_t);
  return false;
}

// The functions above as a type, for kernels that are templates over the format.
template <DType element>
struct MxTileOps {
  using Args = QuantizeArgs;
  using Shared = MxShared;
  static __device__ __forceinline__ void store_whole_scales(const QuantizeArgs&) {}
  static __device__ __forceinline__ bool begin(const QuantizeArgs& args, const Tile& tile) {
    return begin_mx_tile(args, tile);
  }
  template <typename T>
  static __device__ __forceinline__ void write(const QuantizeArgs& args, const Tile& tile,
                                               const TileFragment<T>& values, int warp, int lane,
                                               Shared& shared) {
    write_mx_tile<element>(args, tile, values, warp, lane, shared);
  }
};

template <typename Source, DType element>
__global__ void __launch_bounds__(kThreads, Source::kBlocks)
    quantize_mx_kernel(const __grid_constant__ QuantizeArgs args, const __grid_constant__ Source source) {
  __shared__ MxShared shared;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  for_each_tile(args.layout, [&](const Tile& tile) {
    if (!begin_mx_tile(args, tile)) return;
    TileFragment<typename Source::Value> values;
    source.load(args, tile, warp, lane, values);
    write_mx_tile<element>(args, tile, values, warp, lane, shared);
  });
}

}  // namespace transformer_plugin::quantize
