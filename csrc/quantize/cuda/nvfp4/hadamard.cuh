// The random Hadamard transform of 16 values that a thread holds, and the placement of NVFP4 data in shared
// memory.
#pragma once

#include "quantize/args/quantize_nv.h"
#include "quantize/cuda/tile/common.cuh"

namespace transformer_plugin::quantize {

// 16 neighbouring values.
template <typename T>
using NvPairs = Packed2<T>[kNvBlock / 2];

// Whether a warp's rows are one block of transposed data: not if the matrix or the group has fewer rows
// there, or if the group does not begin with a block (quantize_nv.h).
__device__ __forceinline__ bool is_block(const Tile& tile, int warp) {
  return tile.row % kNvBlock == 0 && (warp + 1) * kNvBlock <= tile.rows;
}

// Distributes blocks of a warp's rows over lanes: of 8 lanes that access shared memory together, 4 have the
// first blocks of one row and 4 those of the next.
__device__ __forceinline__ int block_of_lane(int lane) { return lane % 4 + lane / 8 % 2 * 4; }

// Encoded transposed data, by columns. A warp writes one block of each of 32 columns at a time, which are 4
// apart, and reads whole columns. To avoid bank conflicts in both, blocks are permuted within a column, and
// every other 8 lanes swap columns with their neighbours.
struct NvTransposedTile {
  static constexpr uint32_t kPeriod = kThreads / kNvBlocksPerRow;  // columns that all threads store at once
  static_assert(kPeriod == kNvBlocksPerRow * kColsPerThread,
                "from one such period to the next only neighbours swap");
  uint2 words[kTile * kNvBlocksPerRow];

  static __device__ __forceinline__ uint32_t place(uint32_t column, uint32_t block) {
    const uint32_t lane = column / kColsPerThread;
    return (column ^ (lane / kNvBlocksPerRow & 1)) * kNvBlocksPerRow + (block ^ lane % kNvBlocksPerRow);
  }
  // The position of the column that is `periods` periods after a column of the first period, from the
  // position of the latter.
  static __device__ __forceinline__ uint32_t periods_on(uint32_t place, uint32_t periods) {
    return (place ^ (periods & 1) * kNvBlocksPerRow) + periods * kPeriod * kNvBlocksPerRow;
  }
};

// A word of a column's scales.
__device__ __forceinline__ uint32_t column_scales(const uint8_t (&scales)[kNvBlocksPerRow][kTile], int column,
                                                  int word) {
  Bytes4 data;
#pragma unroll
  for (int i = 0; i < 4; ++i) data.set(i, scales[4 * word + i][column]);
  return data.word;
}

__device__ __forceinline__ void zero_nv_padding(const NvArgs& args, const Tile& tile) {
  if (args.rowwise) zero_word_padding(args.layout, tile, false, args.scale, threadIdx.x, kThreads);
  if (args.transposed) zero_word_padding(args.layout, tile, true, args.scale_t, threadIdx.x, kThreads);
}

// The result is rounded to T. The transform divides by 4. For 16-bit values the division is part of the first
// additions, where it costs less than at the end and is exact. For float32 it is the last step: dividing the
// smallest values first would not be exact.
template <typename T>
__device__ __forceinline__ void transform(float (&x)[kNvBlock], NvPairs<T>& pairs) {
  constexpr bool kEarly = sizeof(T) == 2;
  constexpr float kFirst = kEarly ? 0.25f : 1.0f, kLast = kEarly ? 1.0f : 0.25f;
#pragma unroll
  for (int i = 0; i < kNvBlock; i += 2) {
    const float a = nv_is_negated(i) ? -kFirst : kFirst, b = nv_is_negated(i + 1) ? -kFirst : kFirst;
    const float second = x[i + 1] * b;
    x[i + 1] = fmaf(x[i], a, -second);
    x[i] = fmaf(x[i], a, second);
  }
#pragma unroll
  for (int stride = 2; stride < kNvBlock; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kNvBlock; ++i) {
      if (i & stride) continue;
      const float a = x[i], b = x[i + stride];
      x[i] = a + b;
      x[i + stride] = a - b;
    }
  }
#pragma unroll
  for (int i = 0; i < kNvBlock / 2; ++i) {
    pairs[i] = two_from_floats<T>(x[2 * i] * kLast, x[2 * i + 1] * kLast);
  }
}

}  // namespace transformer_plugin::quantize
