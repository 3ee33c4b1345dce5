// The random Hadamard transform of 16 values that a thread holds, and which threads hold what is transformed.
#pragma once

#include "quantize/args/quantize_nv.h"
#include "quantize/cuda/tile/common.cuh"

namespace transformer_plugin::quantize {

// 16 neighbours.
template <typename T>
using NvPairs = Two<T>[kNvBlock / 2];

// Whether a warp's rows are one block of transposed data: they may be less at the end of the matrix or of a group, and
// are none where a group does not begin with a block (quantize_nv.h).
__device__ __forceinline__ bool is_block(const Tile& tile, int warp) {
  return tile.row % kNvBlock == 0 && (warp + 1) * kNvBlock <= tile.rows;
}

// The rows of a warp. Of 8 lanes that read together 4 have the first blocks of one row, and 4 of the next.
__device__ __forceinline__ int block_of_lane(int lane) { return lane % 4 + lane / 8 % 2 * 4; }

// Codes of transposed data, by columns. A warp writes one block of 32 columns at a time, 4 apart, and reads whole columns. So
// that neither conflict, blocks are permuted within a column, and every other 8 lanes swap columns with their neighbours.
struct NvTurned {
  static constexpr uint32_t kPeriod = kThreads / kNvBlocks;  // columns that a block of threads stores at once
  static_assert(kPeriod == kNvBlocks * kColsPerThread,
                "from one such period to the next only neighbours swap");
  uint2 words[kTile * kNvBlocks];

  static __device__ __forceinline__ uint32_t place(uint32_t column, uint32_t block) {
    const uint32_t lane = column / kColsPerThread;
    return (column ^ (lane / kNvBlocks & 1)) * kNvBlocks + (block ^ lane % kNvBlocks);
  }
  // The place of the column that many periods on, from that of a column of the first.
  static __device__ __forceinline__ uint32_t periods_on(uint32_t place, uint32_t periods) {
    return (place ^ (periods & 1) * kNvBlocks) + periods * kPeriod * kNvBlocks;
  }
};

// A word of a column's scales.
__device__ __forceinline__ uint32_t column_scales(const uint8_t (&scales)[kNvBlocks][kTile], int column,
                                                  int word) {
  Codes4 codes;
#pragma unroll
  for (int i = 0; i < 4; ++i) codes.set(i, scales[4 * word + i][column]);
  return codes.word;
}

__device__ __forceinline__ void zero_nv_padding(const NvArgs& args, const Tile& tile) {
  if (args.rowwise) zero_word_padding(args.layout, tile, false, args.scale, threadIdx.x, kThreads);
  if (args.transposed) zero_word_padding(args.layout, tile, true, args.scale_t, threadIdx.x, kThreads);
}

// Rounded to T. Quarters of 16-bit values are taken on the way into the first sums, where that costs less than at the end:
// they are exact, also the least, so that every sum is the quarter of what it would be. Floats have no room below theirs.
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
