// Shared by the quantize and dequantize kernels: the distribution of a tile over threads, and the tile of
// bytes in shared memory through which data is transposed.
//
// 256 threads hold a tile of 128x128 in registers: warp w rows 16w .. 16w + 15, lane l columns 4l .. 4l + 3.
// A row lies in one warp, and a lane holds 16 bytes of each of 4 rows of the transposed data.
#pragma once

#include <cuda_fp8.h>

#include <type_traits>

#include "common/device_types.cuh"
#include "common/launch.cuh"
#include "common/ptx/memory.cuh"
#include "common/shared_memory.cuh"
#include "quantize/args/layout.h"

namespace transformer_plugin::quantize {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / kWarpSize;
inline constexpr int kRowsPerThread = kTile / kWarps;
inline constexpr int kColsPerThread = kTile / kWarpSize;
inline constexpr int kWordsPerLine = kTile / 4;
static_assert(kRowsPerThread % 4 == 0, "a thread packs its rows into whole words");
static_assert(kColsPerThread == 4, "a thread's columns are one word of data");

// The tile of this block.
__device__ __forceinline__ Tile block_tile(const Layout& layout) { return tile_at(layout, blockIdx.x); }

// The number of blocks for kernels with for_each_tile. The table of a ragged matrix may have up to twice as
// many row tiles as hold rows, and starting a block without work costs time. So there are only as many blocks
// as the matrix would need without groups, or as half of its row tiles need.
inline unsigned block_rows(const Layout& layout) {
  const int64_t half = ceil_div(layout.row_tiles(), 2), least = ceil_div(layout.rows, kTile);
  return static_cast<unsigned>(half > least ? half : least);
}
inline unsigned block_grid(const Layout& layout) {
  if (!layout.grouped()) return static_cast<unsigned>(layout.tiles());
  return block_rows(layout) * static_cast<unsigned>(layout.col_tiles());
}

// Calls work(tile) for the tiles of this block, with all threads: one tile, or up to two of a ragged matrix.
// With `with_unused` false, tiles without rows may be skipped, for kernels that store nothing for them. Blocks of a
// tail that is left out return at once.
template <typename Work>
__device__ __forceinline__ void for_each_tile(const Layout& layout, Work work, bool with_unused = true) {
  int32_t used = INT32_MAX;
#pragma unroll 1
  for (uint32_t index = blockIdx.x;;) {
    const Tile tile = tile_at(layout, index, used);
    if (is_left_out(layout, tile)) return;  // the tail comes last
    work(tile);
    if (!layout.grouped()) return;
    used = tile.used_row_tiles;
    index += gridDim.x;
    const uint32_t row_tiles =
        static_cast<uint32_t>(with_unused && layout.zero_tail ? layout.row_tiles() : used);
    if (index >= row_tiles * static_cast<uint32_t>(layout.col_tiles())) return;
    __syncthreads();  // the first tile's shared memory may be overwritten
  }
}

// Zeroes the words of transposed byte scales of all row tiles from `used` on. `thread` of `threads`, whole
// warps, does its share, in memory order: the words of one tile would be parts of sectors.
__device__ __forceinline__ void zero_unused_words(const Layout& layout, int32_t used, uint8_t* scales,
                                                  uint32_t thread, uint32_t threads) {
  Tile first = {};
  first.row_tile = used;
  const ScaleWords scale_words(layout, first, true);
  const uint32_t words = (static_cast<uint32_t>(layout.row_tiles()) - static_cast<uint32_t>(used)) *
                         static_cast<uint32_t>(layout.words());  // per scale row
  // including padding
  const uint32_t count = static_cast<uint32_t>(layout.col_tiles()) * kTile;
  if (!layout.tiled) {  // one warp per scale row
    for (uint32_t scale_row = thread / kWarpSize; scale_row < count; scale_row += threads / kWarpSize) {
      auto* own = reinterpret_cast<uint32_t*>(scales + scale_words.at(static_cast<int>(scale_row), 0));
      for (uint32_t word = thread % kWarpSize; word < words; word += kWarpSize) own[word] = 0;
    }
    return;
  }
  for (uint32_t i = thread; i < count * words; i += threads) {
    const uint32_t tile = i / kTile;  // of 128 scale rows by one word
    const uint32_t scale_row = tile / words * kTile + i % kTile;
    *reinterpret_cast<uint32_t*>(
        scales + scale_words.at(static_cast<int>(scale_row), static_cast<int>(tile % words))) = 0;
  }
}

// The share of one tile that holds no rows.
__device__ __forceinline__ void zero_unused_words(const Layout& layout, const Tile& tile, uint8_t* scales) {
  const uint32_t strips = static_cast<uint32_t>(layout.col_tiles());
  const uint32_t number = static_cast<uint32_t>(tile.row_tile - tile.used_row_tiles) * strips +
                          static_cast<uint32_t>(tile.col_tile);
  const uint32_t tiles =
      (static_cast<uint32_t>(layout.row_tiles()) - static_cast<uint32_t>(tile.used_row_tiles)) * strips;
  zero_unused_words(layout, tile.used_row_tiles, scales, number * kThreads + threadIdx.x, tiles * kThreads);
}

// Forces the value into a register: the compiler would compute it again in every iteration to save one.
template <typename Number>
__device__ __forceinline__ void keep_in_register(Number& value) {
  if constexpr (std::is_same_v<Number, float>) {
    asm volatile("" : "+f"(value));
  } else {
    static_assert(sizeof(value) == sizeof(int), "one register");
    asm volatile("" : "+r"(value));
  }
}

// base + step * index
template <typename Byte>
__device__ __forceinline__ Byte* step_to(Byte* base, uint32_t step, uint32_t index) {
  uint64_t result;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(result) : "r"(step), "r"(index), "l"(base));
  return reinterpret_cast<Byte*>(result);
}

// Four bytes of quantized data, the first in the lowest byte.
struct Bytes4 {
  uint32_t word = 0;
  __device__ __forceinline__ void set(int i, uint8_t code) { word |= static_cast<uint32_t>(code) << (8 * i); }
  __device__ __forceinline__ uint8_t get(int i) const { return static_cast<uint8_t>(word >> (8 * i)); }
};

// A transposed tile of bytes in shared memory: row c holds the 128 rows of column c as 8 chunks of 16 bytes;
// warp w writes chunk w. Chunks are permuted within a row depending on the lane that owns the column, so that
// there are no bank conflicts when a warp accesses one chunk of 32 columns, nor when it accesses whole rows.
struct TransposedTile {
  static constexpr int kChunks = kTile / 16;
  static_assert(kChunks == kWarps && kRowsPerThread == 16, "a warp's rows are one chunk");
  uint4 chunks[kTile * kChunks];

  __device__ __forceinline__ uint4& chunk(int column, int index) {
    return chunks[column * kChunks + (index ^ ((column / kColsPerThread) % kChunks))];
  }
  __device__ __forceinline__ uint32_t& word(int column, int index) {
    return reinterpret_cast<uint32_t*>(&chunk(column, index / 4))[index % 4];
  }
};

// The rows of a transposed tile in global memory: row c begins at `first + c * stride`. `vectors`: 16-byte
// accesses are aligned.
struct TransposedRows {
  int64_t first;
  int64_t stride;
  bool vectors;

  __device__ __forceinline__ TransposedRows(const Layout& layout, const Tile& tile, const void* data)
      : TransposedRows(layout, tile, data, layout.rows, tile.row) {}
  // For layouts that may be `aligned`.
  static __device__ __forceinline__ TransposedRows of(const Layout& layout, const Tile& tile,
                                                      const void* data) {
    return {layout, tile, data, layout.transposed_row_length(), transposed_begin(layout, tile)};
  }

 private:
  __device__ __forceinline__ TransposedRows(const Layout& layout, const Tile& tile, const void* data,
                                            int64_t length, int64_t begin)
      : first((tile.matrix * layout.cols + tile.col) * length + begin),
        stride(length),
        vectors(tile.rows == kTile && stride % 16 == 0 &&
                (reinterpret_cast<uintptr_t>(data) + first) % 16 == 0) {}
};

// Transposes 4 rows of 4 bytes.
__device__ __forceinline__ void transpose_4x4(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
  const uint32_t low01 = __byte_perm(rows[0], rows[1], 0x5140), low23 = __byte_perm(rows[2], rows[3], 0x5140);
  const uint32_t high01 = __byte_perm(rows[0], rows[1], 0x7362),
                 high23 = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(low01, low23, 0x5410);
  columns[1] = __byte_perm(low01, low23, 0x7632);
  columns[2] = __byte_perm(high01, high23, 0x5410);
  columns[3] = __byte_perm(high01, high23, 0x7632);
}

// Stores part of a 32-byte sector whose rest is stored by other blocks. evict_last keeps it in the L2 cache
// until the sector is complete; an evicted sector would be read from memory again.
template <typename Word>
__device__ __forceinline__ void store_evict_last(void* target, Word word) {
  const uint64_t policy = ptx::createpolicy_evict_last();
  if constexpr (sizeof(word) == 8) {
    asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;" ::"l"(target), "r"(word.x),
                 "r"(word.y), "l"(policy)
                 : "memory");
  } else if constexpr (sizeof(word) == 4) {
    asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(target), "r"(word), "l"(policy)
                 : "memory");
  } else if constexpr (sizeof(word) == 2) {
    asm volatile("st.global.L2::cache_hint.u16 [%0], %1, %2;" ::"l"(target), "h"(word), "l"(policy)
                 : "memory");
  } else {
    asm volatile("st.global.L2::cache_hint.u8 [%0], %1, %2;" ::"l"(target), "h"(static_cast<uint16_t>(word)),
                 "l"(policy)
                 : "memory");
  }
}

// `count` of the 4 bytes of a word, to or from memory; in one access if `aligned`.
__device__ __forceinline__ void store_bytes(uint8_t* target, Bytes4 bytes, int count, bool aligned) {
  if (aligned && count >= 4) {
    *reinterpret_cast<uint32_t*>(target) = bytes.word;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) target[i] = bytes.get(i);
  }
}

__device__ __forceinline__ Bytes4 load_bytes(const uint8_t* source, int count, bool aligned) {
  Bytes4 bytes;
  if (aligned && count >= 4) {
    bytes.word = *reinterpret_cast<const uint32_t*>(source);
    return bytes;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) bytes.set(i, source[i]);
  }
  return bytes;
}

__device__ __forceinline__ bool is_word_aligned(const void* pointer) {
  return (reinterpret_cast<uintptr_t>(pointer) & 3u) == 0;
}

// A grid of one block per tile.
inline unsigned tile_grid(const Layout& layout) { return static_cast<unsigned>(layout.tiles()); }

}  // namespace transformer_plugin::quantize
