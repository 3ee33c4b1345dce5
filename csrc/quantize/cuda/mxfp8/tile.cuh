// A tile quantized by microscaling: E8M0 scales of 1x32 or 32x32 blocks. The tail of a ragged matrix needs no case of its
// own: its values are zero, whose scale is 0.
#pragma once

#include "quantize/cuda/tile/common.cuh"

namespace transformer_plugin::quantize {

inline constexpr int kLanesPerBlock = kMxBlock / kColsPerThread;
inline constexpr int kWarpsPerBlock = kMxBlock / kRowsPerThread;
static_assert(kWarpsPerBlock == 2 && kLanesPerBlock == 8, "a 32x32 block is 2 warps of 8 lanes");

// The maximum over the lanes whose columns lie in one block, in each of them.
__device__ __forceinline__ float block_max(float value) {
#pragma unroll
  for (int distance = kLanesPerBlock / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

// The largest value as a constant, whose reciprocal the compiler then takes.
template <DType element>
__device__ __forceinline__ uint8_t exponent_of(float amax) {
  return e8m0_of_amax(amax, largest_fp8<element>());
}

// The exponent of a block in its place in a float's bits: e8m0_of_amax without branches, of a number.
template <DType element>
__device__ __forceinline__ uint32_t quick_e8m0_bits(float amax) {
  const uint32_t bits = float_to_bits(amax * (1.0f / largest_fp8<element>()));
  const uint32_t up = bits > 0x400000u ? bits + 0x7fffffu : 0u;  // 2^-127 is 0x400000
  return min(up & 0x7f800000u, 0x7f000000u);                     // infinity counts as the largest
}
// e8m0_multiplier of it.
__device__ __forceinline__ float quick_e8m0_multiplier(uint32_t bits) {
  return bits_to_float(max(0x7f000000u - bits, 0x00400000u));
}

// Largest magnitudes: of each column over the rows of a warp, and of each warp's part of a 32x32 block.
struct MxPartial {
  alignas(16) float of_columns[kWarps][kTile];
  float of_squares[kWarps][kMxBlocks];

  __device__ __forceinline__ float column(int row_block, int column) const {
    return fmaxf(of_columns[2 * row_block][column], of_columns[2 * row_block + 1][column]);
  }
  __device__ __forceinline__ float square(int row_block, int column_block) const {
    return fmaxf(of_squares[2 * row_block][column_block], of_squares[2 * row_block + 1][column_block]);
  }
};

template <typename T>
__device__ __forceinline__ void find_partial(const Values<T>& values, int warp, int lane,
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

// A lane answers for two rows of its block.
template <DType element, typename T>
__device__ __forceinline__ void write_mx_rows(const QuantizeArgs& args, const Tile& tile,
                                              const Values<T>& values, int warp, int lane,
                                              const MxPartial& partial) {
  const Layout& layout = args.layout;
  const int block = lane / kLanesPerBlock;
  const int first_row = warp * kRowsPerThread;
  using Maxima = RowMaxima<kLanesPerBlock, T>;
  float multipliers[Maxima::kCount];
  Maxima maxima;
  if (!layout.square) maxima.find(values, lane);
  const WordLines lines(layout, tile, false);
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
      store_kept(args.exponents + lines.at(row), word);
    }
  }
  write_rows_of_codes<element>(args, tile, values, first_row, lane, [&](int r) {
    const int holder = block * kLanesPerBlock + Maxima::lane_of(r);
    return __shfl_sync(0xffffffffu, multipliers[r % Maxima::kCount], holder);
  });
}

// The exponents of the blocks along each column, [row block][column].
struct ColumnExponents {
  alignas(4) uint8_t at[kMxBlocks][kTile];
};

// Each of them by one thread, and kept for all; the word of a column is written by the thread of its number.
template <DType element>
__device__ __forceinline__ void find_column_exponents(bool square, const MxPartial& partial,
                                                      ColumnExponents& exponents) {
#pragma unroll
  for (int i = 0; i < kMxBlocks * kTile / kThreads; ++i) {
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
  Codes4 word;
#pragma unroll
  for (int b = 0; b < kMxBlocks; ++b) word.set(b, exponents.at[b][column]);
  store_kept(args.exponents_t + WordLines(args.layout, tile, true).at(column), word.word);
}

// What a block needs in shared memory for one tile.
struct MxShared {
  MxPartial partial;
  ColumnExponents exponents;
  TransposedTile turned;
};

// Codes and scales of a tile in the directions that are asked for. All threads of the block call it.
template <DType element, typename T>
__device__ __forceinline__ void write_mx_tile(const QuantizeArgs& args, const Tile& tile,
                                              const Values<T>& values, int warp, int lane, MxShared& shared) {
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
    write_columns<element, false>(args, tile, values, warp, lane, scales, shared.turned);
  }
}

// Padding of the scales, and the scales of a tile past the last group. Says whether the tile is to be written.
__device__ __forceinline__ bool begin_mx_tile(const QuantizeArgs& args, const Tile& tile) {
  const Layout& layout = args.layout;
  if (args.is_noop()) return false;
  if (threadIdx.x == 0 && args.rowwise) zero_word_padding(layout, tile, false, args.exponents);
  if (threadIdx.x == 0 && args.transposed) zero_word_padding(layout, tile, true, args.exponents_t);
  if (tile.rows > 0) return true;
  if (args.transposed) zero_unused_words(layout, tile, args.exponents_t);
  return false;
}

// The above as one type, for kernels that store tiles of either kind.
template <DType element>
struct MxFamily {
  using Args = QuantizeArgs;
  using Shared = MxShared;
  static __device__ __forceinline__ bool begin(const QuantizeArgs& args, const Tile& tile) {
    return begin_mx_tile(args, tile);
  }
  template <typename T>
  static __device__ __forceinline__ void write(const QuantizeArgs& args, const Tile& tile,
                                               const Values<T>& values, int warp, int lane, Shared& shared) {
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
    Values<typename Source::Value> values;
    source.load(args, tile, warp, lane, values);
    write_mx_tile<element>(args, tile, values, warp, lane, shared);
  });
}

}  // namespace transformer_plugin::quantize
