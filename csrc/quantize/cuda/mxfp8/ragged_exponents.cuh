// E8M0 exponents in the MXFP8 kernel of ragged transposed data (ragged_transpose.cuh): maxima of columns,
// shared memory, and the stores of exponents.
#pragma once

#include "quantize/cuda/mxfp8/ragged_transpose_tiles.cuh"
#include "quantize/cuda/mxfp8/tile.cuh"

namespace transformer_plugin::quantize {

// Maxima of the magnitudes of a lane's 4 columns.
template <typename T>
struct ColumnMaxima {
  static_assert(sizeof(T) == 2, "two of them in a register");
  Packed2<T> at[kColsPerThread / 2] = {zeros<T>(), zeros<T>()};

  __device__ __forceinline__ void add(const Packed2<T> (&values)[kColsPerThread / 2]) {
#pragma unroll
    for (int i = 0; i < kColsPerThread / 2; ++i) at[i] = larger_magnitudes(at[i], values[i]);
  }
  __device__ __forceinline__ void add(const uint2& vector) {
    Packed2<T> values[kColsPerThread / 2];
    memcpy(values, &vector, sizeof(vector));
    add(values);
  }
  __device__ __forceinline__ uint2 vector() const {
    uint2 vector;
    memcpy(&vector, at, sizeof(vector));
    return vector;
  }
  // The E8M0 exponents, the first column's in the lowest byte.
  template <DType element>
  __device__ __forceinline__ uint32_t exponents() const {
    Bytes4 bytes;
#pragma unroll
    for (int i = 0; i < kColsPerThread / 2; ++i) {
      const float2 two = to_floats(at[i]);
      bytes.word |= quick_e8m0_bits<element>(fabsf(two.x)) >> 23 << (16 * i);
      bytes.word |= quick_e8m0_bits<element>(fabsf(two.y)) >> 23 << (16 * i + 8);
    }
    return bytes.word;
  }
};

struct MxStripShared {
  TransposedTile transposed_tile;
  alignas(16) uint8_t exponents[kTile][kTile];  // [row][column], for blocks that begin in the row
  uint2 heads[kWarps][kWarpSize];  // ColumnMaxima of each segment's head; 0 if a block begins with it
  uint2 tails[kWarps][kWarpSize];
  uint2 before[kWarps][kWarpSize];  // of the rows before the strip, a share by each warp
  uint2 after[kWarps][kWarpSize];   // of the rows after the strip
  int32_t used_row_tiles;

  // Adds the maxima of the rows of a segment that continue a block of the segment before it, and the reverse.
  // Segment -1 stands for the rows before the strip, segment kWarps for those after it.
  template <typename T>
  __device__ __forceinline__ void add_head(ColumnMaxima<T>& maxima, int segment, int lane) const {
    segment < kWarps ? maxima.add(heads[segment][lane]) : add_all(maxima, after, lane);
  }
  template <typename T>
  __device__ __forceinline__ void add_tail(ColumnMaxima<T>& maxima, int segment, int lane) const {
    segment >= 0 ? maxima.add(tails[segment][lane]) : add_all(maxima, before, lane);
  }

 private:
  template <typename T>
  static __device__ __forceinline__ void add_all(ColumnMaxima<T>& maxima,
                                                 const uint2 (&shares)[kWarps][kWarpSize], int lane) {
#pragma unroll
    for (int i = 0; i < kWarps; ++i) maxima.add(shares[i][lane]);
  }
};

// Stores bytes `from` to `to` of a word; other blocks store the rest.
__device__ __forceinline__ void store_part_of_word(uint8_t* target, uint32_t word, int from, int to) {
  if (to - from == 4) return store_evict_last(target, word);
  if (from % 2 != 0) {
    store_evict_last(target + from, static_cast<uint8_t>(word >> (8 * from)));
    ++from;
  }
  if (to - from >= 2) {
    store_evict_last(target + from, static_cast<uint16_t>(word >> (8 * from)));
    from += 2;
  }
  if (from < to) store_evict_last(target + from, static_cast<uint8_t>(word >> (8 * from)));
}

// Stores the exponents of the column blocks that begin in the strip. The first four warps take row tiles with
// even numbers, the others those with odd numbers; a thread takes one column. The last block of a tile also
// zeroes the rest of its word.
__device__ __forceinline__ void write_strip_exponents(const QuantizeArgs& args, const Tile& strip,
                                                      int row_tile, StripTile tiles, int warp, int lane,
                                                      const MxStripShared& shared) {
  const int column = threadIdx.x % kTile;
  const bool tiled = args.layout.tiled;
  Tile first = strip;
  first.row_tile = row_tile;
  uint8_t* target = args.exponents_t + ScaleWords(args.layout, first, true).at(column);
#pragma unroll 1
  for (;;) {
    const bool more = tiles.more();
    const int count = __popc(__ballot_sync(0xffffffffu, tiles.begin() < kTile));
#pragma unroll 1
    for (int i = warp / (kWarps / 2); i < count; i += 2) {
      StripTile at = tiles;
      at.packed = __shfl_sync(0xffffffffu, tiles.packed, i);
      const int begin = at.begin(), blocks = at.blocks();
      uint32_t word = 0;
      int from = kMxBlocksPerRow, to = 0;
#pragma unroll
      for (int block = kMxBlocksPerRow - 1; block >= 0; --block) {
        const int row = begin + block * kMxBlock;
        if (block >= blocks || static_cast<uint32_t>(row) >= kTile) continue;
        word |= static_cast<uint32_t>(shared.exponents[row][column]) << (8 * block);
        from = block;
        to = max(to, block + 1);
      }
      if (from >= to) continue;
      store_part_of_word(target + (tiled ? i * 512 : i * 4), word, from, to == blocks ? kMxBlocksPerRow : to);
    }
    if (!more) return;
    row_tile += kWarpSize;
    target += tiled ? kWarpSize * 512 : kWarpSize * 4;
    tiles = StripTile(lane_row_tile(args.layout, row_tile, lane), static_cast<int>(strip.row));
  }
}

// Finds and stores the exponents of a warp's rows, one word per row. A lane keeps the multipliers of two rows
// of its block. Rows after the matrix get exponents of 0, up to a multiple of 128.
template <DType element, typename T>
__device__ __forceinline__ void write_row_exponents(const QuantizeArgs& args, const Tile& strip,
                                                    const TileFragment<T>& values, int warp, int lane,
                                                    float (&multipliers)[2]) {
  using Maxima = RowMaxima<kLanesPerBlock, T>;
  static_assert(Maxima::kCount == 2, "a lane holds the maxima of two rows");
  Maxima maxima;
  maxima.find(values, lane);
  const uint32_t first = quick_e8m0_bits<element>(maxima.amax(0)),
                 second = quick_e8m0_bits<element>(maxima.amax(1));
  multipliers[0] = quick_e8m0_multiplier(first);
  multipliers[1] = quick_e8m0_multiplier(second);
  // Combine the bytes of both rows over two blocks, then over four: even lanes of a block form the word of
  // the first row, odd lanes that of the second.
  const int block = lane / kLanesPerBlock;
  const uint32_t own = first >> 23 | second >> 15;
  const uint32_t neighbour = __shfl_xor_sync(0xffffffffu, own, kLanesPerBlock);
  const uint32_t two = block % 2 == 0 ? own | neighbour << 16 : neighbour | own << 16;
  const uint32_t others = __shfl_xor_sync(0xffffffffu, two, 2 * kLanesPerBlock);
  const int row = warp * kRowsPerThread + Maxima::first_of(lane) + block;
  if (block < 2) {
    store_evict_last(args.exponents + ScaleWords(args.layout, strip, false).at(row),
                     __byte_perm(two, others, block == 0 ? 0x6420 : 0x7531));
  }
}

}  // namespace transformer_plugin::quantize
