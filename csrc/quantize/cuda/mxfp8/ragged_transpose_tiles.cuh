// The row tiles of ragged groups that have rows of a window of the buffer (mx_window.cuh), and where in it blocks of columns
// begin, which are 1x32 along the rows of a group.
#pragma once

#include "quantize/cuda/tile/tile.cuh"

namespace transformer_plugin::quantize {

// An entry of a table in one load.
template <typename Vector, typename Entry>
__device__ __forceinline__ Entry load_entry(const Entry* table, int index) {
  static_assert(sizeof(Vector) == sizeof(Entry), "as many bytes");
  const Vector vector = *reinterpret_cast<const Vector*>(table + index);
  Entry entry;
  memcpy(&entry, &vector, sizeof(entry));
  return entry;
}

// The lane's of the 32 row tiles from `first` on.
__device__ __forceinline__ RowTile lane_row_tile(const Layout& layout, int first, int lane) {
  const int index = first + lane;
  if (index >= static_cast<int>(layout.row_tiles())) return {0, 0, 0, false, 0};
  return load_entry<uint4>(layout.row_tile_table, index);
}

// Where the blocks of a row tile begin in the window, in one register.
struct WindowTile {
  int packed;

  __device__ __forceinline__ WindowTile(const RowTile& tile, int window_row)
      : packed((tile.rows > 0 ? tile.row - window_row : kTile) * 8 + (tile.rows + kMxBlock - 1) / kMxBlock) {}
  // Rows from the window's first to the tile's; negative for a tile that begins above.
  __device__ __forceinline__ int begin() const { return packed >> 3; }
  __device__ __forceinline__ int blocks() const { return packed & 7; }
  // Of 32 rows from `row` of the window on, a bit for each in which a block begins.
  __device__ __forceinline__ uint32_t begins(int row) const {
    const int from = begin() - row;
    const int block = -(from >> kMxBlockShift);
    return static_cast<uint32_t>(block) < static_cast<uint32_t>(blocks()) ? 1u << (from & 31) : 0;
  }
  // Whether the tiles after these 32 may have rows of the window.
  __device__ __forceinline__ bool more() const { return __all_sync(0xffffffffu, begin() < kTile); }
};

// The slot's rows in which blocks of columns begin, a bit for each, and whether any does in the slots beside it.
struct SlotBegins {
  uint32_t rows;
  bool any_before, any_after;

  // `tiles` are the first 32 of the window, which begin with row tile `first`.
  __device__ __forceinline__ SlotBegins(const Layout& layout, WindowTile tiles, int first, int window_row,
                                        int first_row, int lane) {
    uint32_t from_before = 0, from_after = 0;  // 32 rows from the slot before on, and from the one after
    for (;;) {
      from_before |= tiles.begins(first_row - kRowsPerThread);
      from_after |= tiles.begins(first_row + kRowsPerThread);
      if (!tiles.more()) break;
      first += kWarpSize;
      tiles = WindowTile(lane_row_tile(layout, first, lane), window_row);
    }
    from_before = __reduce_or_sync(0xffffffffu, from_before);
    from_after = __reduce_or_sync(0xffffffffu, from_after);
    rows = from_before >> kRowsPerThread;
    any_before = (from_before & 0xffffu) != 0;
    any_after = (from_after & 0xffffu) != 0;
  }
};

}  // namespace transformer_plugin::quantize
