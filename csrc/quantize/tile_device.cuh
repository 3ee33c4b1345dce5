// What the quantize and dequantize kernels share: who holds which elements of a tile, and the byte tile in
// shared memory through which data turns.
//
// 256 threads hold a tile of 128x128 in registers: warp w the rows 16w .. 16w + 15, lane l the columns 4l ..
// 4l + 3. So a row lies in one warp, and a lane holds 16 bytes of each of its 4 transposed rows.
#pragma once

#include <cuda_fp8.h>

#include "common/device_types.cuh"
#include "common/launch.cuh"
#include "quantize/tiles.h"

namespace transformer_plugin::quantize {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / kWarpSize;
inline constexpr int kRowsPerThread = kTile / kWarps;
inline constexpr int kColsPerThread = kTile / kWarpSize;
inline constexpr int kWordsPerLine = kTile / 4;
static_assert(kRowsPerThread % 4 == 0, "a thread packs its rows into whole words");
static_assert(kColsPerThread == 4, "a thread's columns are one word of codes");

// group_of_tile by a whole warp: each step leaves a 32nd of the groups.
__device__ __forceinline__ int64_t group_of_tile_by_warp(const Layout& layout, int64_t row_tile) {
  const int lane = threadIdx.x % kWarpSize;
  int low = 0;
  int size = static_cast<int>(layout.groups);  // the answer is one of low .. low + size
  while (size > 0) {
    const int step = (size + kWarpSize - 1) / kWarpSize;
    const int last = (lane + 1) * step - 1;  // of this lane's share
    const bool passed = last < size && layout.tile_offsets[low + last + 1] <= row_tile;
    const int done = __popc(__ballot_sync(0xffffffffu, passed)) * step;
    low += done;
    size = min(step - 1, size - done);
  }
  return low;
}

// The tile of this block.
__device__ __forceinline__ Tile block_tile(const Layout& layout) {
  return tile_at(layout, blockIdx.x, group_of_tile_by_warp);
}

// 4 codes, the first in the lowest byte.
struct Codes4 {
  uint32_t word = 0;
  __device__ __forceinline__ void set(int i, uint8_t code) { word |= static_cast<uint32_t>(code) << (8 * i); }
  __device__ __forceinline__ uint8_t get(int i) const { return static_cast<uint8_t>(word >> (8 * i)); }
};

// A transposed tile of codes: line c holds the 128 rows of column c as 32 words. Words are permuted within a
// line by the lane that owns the column, so neither the writes (one word of 32 columns) nor the reads (one
// line) conflict.
struct TransposedTile {
  uint32_t words[kTile * kWordsPerLine];
  __device__ __forceinline__ uint32_t& at(int column, int word) {
    return words[column * kWordsPerLine + (word ^ ((column / kColsPerThread) & (kWordsPerLine - 1)))];
  }
};

// `count` of the 4 bytes of a word, to or from memory; in one access where `aligned`.
__device__ __forceinline__ void store_codes(uint8_t* target, Codes4 codes, int count, bool aligned) {
  if (aligned && count >= 4) {
    *reinterpret_cast<uint32_t*>(target) = codes.word;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) target[i] = codes.get(i);
  }
}

__device__ __forceinline__ Codes4 load_codes(const uint8_t* source, int count, bool aligned) {
  Codes4 codes;
  if (aligned && count >= 4) {
    codes.word = *reinterpret_cast<const uint32_t*>(source);
    return codes;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) codes.set(i, source[i]);
  }
  return codes;
}

__device__ __forceinline__ bool is_word_aligned(const void* pointer) {
  return (reinterpret_cast<uintptr_t>(pointer) & 3u) == 0;
}

// Calls kernel launches with a grid of one block a tile.
inline unsigned tile_grid(const Layout& layout) { return static_cast<unsigned>(layout.tiles()); }

}  // namespace transformer_plugin::quantize
