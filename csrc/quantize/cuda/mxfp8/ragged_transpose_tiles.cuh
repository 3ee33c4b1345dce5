// For the MXFP8 kernel of ragged transposed data (ragged_transpose.cuh): which row tiles have rows in a
// 128-row strip of the buffer, and in which rows of the strip the 1x32 blocks of a column begin. Blocks of a
// column begin with its group.
#pragma once

#include "quantize/cuda/tile/tile.cuh"

namespace transformer_plugin::quantize {

// Reads an entry of a table in one load.
template <typename Vector, typename Entry>
__device__ __forceinline__ Entry load_entry(const Entry* table, int index) {
  static_assert(sizeof(Vector) == sizeof(Entry), "as many bytes");
  const Vector vector = *reinterpret_cast<const Vector*>(table + index);
  Entry entry;
  memcpy(&entry, &vector, sizeof(entry));
  return entry;
}

// Row tile `first + lane`; empty past the end of the table.
__device__ __forceinline__ RowTile lane_row_tile(const Layout& layout, int first, int lane) {
  const int index = first + lane;
  if (index >= static_cast<int>(layout.row_tiles())) return {0, 0, 0, false, 0};
  return load_entry<uint4>(layout.row_tile_table, index);
}

// The begin of a row tile relative to the strip and its number of blocks, packed in one register.
struct StripTile {
  int packed;

  __device__ __forceinline__ StripTile(const RowTile& tile, int strip_row)
      : packed((tile.rows > 0 ? tile.row - strip_row : kTile) * 8 + (tile.rows + kMxBlock - 1) / kMxBlock) {}
  // Rows from the strip's first to the tile's; negative for a tile that begins before the strip.
  __device__ __forceinline__ int begin() const { return packed >> 3; }
  __device__ __forceinline__ int blocks() const { return packed & 7; }
  // A bit mask over the 32 rows from `row` of the strip on: those in which a block of this tile begins.
  __device__ __forceinline__ uint32_t begins(int row) const {
    const int from = begin() - row;
    const int block = -(from >> kMxBlockShift);
    return static_cast<uint32_t>(block) < static_cast<uint32_t>(blocks()) ? 1u << (from & 31) : 0;
  }
  // Whether row tiles after the 32 of this warp may have rows in the strip.
  __device__ __forceinline__ bool more() const { return __all_sync(0xffffffffu, begin() < kTile); }
};

// The rows of a warp's segment in which blocks of columns begin, and whether any begins in the neighbouring
// segments.
struct SegmentBegins {
  uint32_t rows;  // bit mask over the segment's 16 rows
  bool any_before, any_after;

  // `tiles` holds the strip's first 32 row tiles, one per lane; the first is row tile `first`.
  __device__ __forceinline__ SegmentBegins(const Layout& layout, StripTile tiles, int first, int strip_row,
                                           int first_row, int lane) {
    uint32_t from_before = 0,
             from_after = 0;  // over 32 rows: from the previous segment on, from the next one on
    for (;;) {
      from_before |= tiles.begins(first_row - kRowsPerThread);
      from_after |= tiles.begins(first_row + kRowsPerThread);
      if (!tiles.more()) break;
      first += kWarpSize;
      tiles = StripTile(lane_row_tile(layout, first, lane), strip_row);
    }
    from_before = __reduce_or_sync(0xffffffffu, from_before);
    from_after = __reduce_or_sync(0xffffffffu, from_after);
    rows = from_before >> kRowsPerThread;
    any_before = (from_before & 0xffffu) != 0;
    any_after = (from_after & 0xffffu) != 0;
  }
};

}  // namespace transformer_plugin::quantize
