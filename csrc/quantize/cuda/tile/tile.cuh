// What the quantize and dequantize kernels share: who holds which elements of a tile, and the byte tile in
// shared memory through which data turns.
//
// 256 threads hold a tile of 128x128 in registers: warp w the rows 16w .. 16w + 15, lane l the columns 4l ..
// 4l + 3. So a row lies in one warp, and a lane holds 16 bytes of each of its 4 transposed rows.
#pragma once

#include <cuda_fp8.h>

#include <type_traits>

#include "common/device_types.cuh"
#include "common/launch.cuh"
#include "common/shared_memory.cuh"
#include "quantize/args/layout.h"

namespace transformer_plugin::quantize {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / kWarpSize;
inline constexpr int kRowsPerThread = kTile / kWarps;
inline constexpr int kColsPerThread = kTile / kWarpSize;
inline constexpr int kWordsPerLine = kTile / 4;
static_assert(kRowsPerThread % 4 == 0, "a thread packs its rows into whole words");
static_assert(kColsPerThread == 4, "a thread's columns are one word of codes");

// The tile of this block.
__device__ __forceinline__ Tile block_tile(const Layout& layout) { return tile_at(layout, blockIdx.x); }

// Blocks of a grid whose kernel calls for_each_tile. The table of a ragged matrix may have up to twice as many row tiles as
// hold rows, and a block that finds nothing takes time to start. So there are only as many blocks as the matrix without
// groups would take, or as half of its row tiles need.
inline unsigned block_rows(const Layout& layout) {
  const int64_t half = ceil_div(layout.row_tiles(), 2), least = ceil_div(layout.rows, kTile);
  return static_cast<unsigned>(half > least ? half : least);
}
inline unsigned block_grid(const Layout& layout) {
  if (!layout.grouped()) return static_cast<unsigned>(layout.tiles());
  return block_rows(layout) * static_cast<unsigned>(layout.col_tiles());
}

// Calls work(tile) with the tiles of this block, all threads together: one, and of a ragged matrix up to two. Tiles that hold
// no rows may be left out, where nothing is stored for them.
template <typename Work>
__device__ __forceinline__ void for_each_tile(const Layout& layout, Work work, bool with_unused = true) {
  int32_t used = INT32_MAX;
#pragma unroll 1
  for (uint32_t index = blockIdx.x;;) {
    const Tile tile = tile_at(layout, index, used);
    work(tile);
    if (!layout.grouped()) return;
    used = tile.used;
    index += gridDim.x;
    const uint32_t row_tiles = static_cast<uint32_t>(with_unused ? layout.row_tiles() : used);
    if (index >= row_tiles * static_cast<uint32_t>(layout.col_tiles())) return;
    __syncthreads();  // the first tile has left shared memory
  }
}

// Zeroes the words of transposed byte scales that row tiles from `used` on have in each line, a share of them by each of
// `threads`, whole warps all of which call it. As they lie in memory: the words of one tile would be parts of sectors.
__device__ __forceinline__ void zero_unused_words(const Layout& layout, int32_t used, uint8_t* scales,
                                                  uint32_t thread, uint32_t threads) {
  Tile first = {};
  first.row_tile = used;
  const WordLines lines(layout, first, true);
  const uint32_t words = (static_cast<uint32_t>(layout.row_tiles()) - static_cast<uint32_t>(used)) *
                         static_cast<uint32_t>(layout.words());  // of a line
  // Also of lines that are padding.
  const uint32_t count = static_cast<uint32_t>(layout.col_tiles()) * kTile;
  if (!layout.tiled) {  // a warp takes a line
    for (uint32_t line = thread / kWarpSize; line < count; line += threads / kWarpSize) {
      auto* own = reinterpret_cast<uint32_t*>(scales + lines.at(static_cast<int>(line), 0));
      for (uint32_t word = thread % kWarpSize; word < words; word += kWarpSize) own[word] = 0;
    }
    return;
  }
  for (uint32_t i = thread; i < count * words; i += threads) {
    const uint32_t tile = i / kTile;  // of lines by a word
    const uint32_t line = tile / words * kTile + i % kTile;
    *reinterpret_cast<uint32_t*>(scales + lines.at(static_cast<int>(line), static_cast<int>(tile % words))) =
        0;
  }
}

// The share of a tile that holds no rows.
__device__ __forceinline__ void zero_unused_words(const Layout& layout, const Tile& tile, uint8_t* scales) {
  const uint32_t strips = static_cast<uint32_t>(layout.col_tiles());
  const uint32_t number =
      static_cast<uint32_t>(tile.row_tile - tile.used) * strips + static_cast<uint32_t>(tile.col_tile);
  const uint32_t tiles =
      (static_cast<uint32_t>(layout.row_tiles()) - static_cast<uint32_t>(tile.used)) * strips;
  zero_unused_words(layout, tile.used, scales, number * kThreads + threadIdx.x, tiles * kThreads);
}

// Computed here, once: the compiler would rather save the register and compute it in every step.
template <typename Number>
__device__ __forceinline__ void keep(Number& value) {
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

// 4 codes, the first in the lowest byte.
struct Codes4 {
  uint32_t word = 0;
  __device__ __forceinline__ void set(int i, uint8_t code) { word |= static_cast<uint32_t>(code) << (8 * i); }
  __device__ __forceinline__ uint8_t get(int i) const { return static_cast<uint8_t>(word >> (8 * i)); }
};

// A transposed tile of codes: line c holds the 128 rows of column c as 8 chunks of 16 bytes, of which warp w writes
// the w-th. Chunks are permuted within a line by the lane that owns the column, so that neither the accesses of a warp
// to one chunk of 32 columns nor those to whole lines conflict.
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

// The lines of a tile in global memory: line c begins at `first + c * stride`. Whether 16 bytes move at once.
struct TransposedLines {
  int64_t first;
  int64_t stride;
  bool vectors;

  __device__ __forceinline__ TransposedLines(const Layout& layout, const Tile& tile, const void* data)
      : TransposedLines(layout, tile, data, layout.rows, tile.row) {}
  // Of lines that may be aligned.
  static __device__ __forceinline__ TransposedLines of(const Layout& layout, const Tile& tile,
                                                       const void* data) {
    return {layout, tile, data, layout.line_length(), line_begin(layout, tile)};
  }

 private:
  __device__ __forceinline__ TransposedLines(const Layout& layout, const Tile& tile, const void* data,
                                             int64_t length, int64_t begin)
      : first((tile.member * layout.cols + tile.col) * length + begin),
        stride(length),
        vectors(tile.rows == kTile && stride % 16 == 0 &&
                (reinterpret_cast<uintptr_t>(data) + first) % 16 == 0) {}
};

// 4 rows of 4 codes to 4 columns of 4 codes.
__device__ __forceinline__ void turn4(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
  const uint32_t low01 = __byte_perm(rows[0], rows[1], 0x5140), low23 = __byte_perm(rows[2], rows[3], 0x5140);
  const uint32_t high01 = __byte_perm(rows[0], rows[1], 0x7362),
                 high23 = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(low01, low23, 0x5410);
  columns[1] = __byte_perm(low01, low23, 0x7632);
  columns[2] = __byte_perm(high01, high23, 0x5410);
  columns[3] = __byte_perm(high01, high23, 0x7632);
}

// Stores a part of a sector of 32 bytes whose rest comes from other blocks. The second level cache keeps such lines before
// others, so that the parts meet there: one that leaves it is read from memory again for the next part.
template <typename Word>
__device__ __forceinline__ void store_kept(void* target, Word word) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
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
