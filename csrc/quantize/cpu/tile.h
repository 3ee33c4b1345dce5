// Shared by the CPU kernels of the quantize family: a tile as floats, the loop over tiles, and the stores of
// a tile. A source is a function `load(tile, values)` that fills the tile with the values to be quantized,
// already rounded to the dtype of the input; it is not called for the tail.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <type_traits>

#include "quantize/args/quantize.h"
#include "quantize/args/quantize_nv.h"

namespace transformer_plugin::quantize {

// One tile as floats, row by row. Only the rows and columns of the tile are written and read: clearing the
// whole array would double the time for a tiny matrix.
struct FloatTile {
  alignas(64) float at[kTile][kTile];
};

// The bits of |x|, which order like the floats; 0 for NaN.
TP_HOST_DEVICE int32_t magnitude(float value) {
  const int32_t bits = static_cast<int32_t>(float_to_bits(value) & 0x7fffffffu);
  return bits > 0x7f800000 ? 0 : bits;
}

// Full tiles, which most are, get loops of a constant length.
template <typename Fn>
TP_HOST_DEVICE void with_width(int cols, Fn&& fn) {
  cols == kTile ? fn(std::integral_constant<int, kTile>{}) : fn(cols);
}

// Prefetches the next tile of the row: rows are too far apart for the hardware prefetcher.
template <typename T>
TP_HOST_DEVICE void prefetch_next(const T* row) {
  constexpr int kCacheLine = 64 / sizeof(T);
  for (int c = kTile; c < 2 * kTile; c += kCacheLine) __builtin_prefetch(row + c);
}

// A tile of a matrix with as many columns as the layout.
void load_tile_cpu(const void* input, DType dtype, const Layout& layout, const Tile& tile, FloatTile& values);
// A tile of the kernel's input.
template <typename Args>
void load_tile_cpu(const Args& args, const Tile& tile, FloatTile& values) {
  load_tile_cpu(args.input, args.dtype, args.layout, tile, values);
}
// Stores the columns of a tile, given row by row, as rows that are `stride` apart.
void transpose(const uint8_t (*data)[kTile], int rows, int cols, uint8_t* output, int64_t stride);
// Zeroes the gaps around the tile in the `aligned` layout of transposed data.
void zero_gaps(const QuantizeArgs& args, const Tile& tile);
int32_t magnitude_of_tile(const Tile& tile, const FloatTile& values);
// Atomic: the largest of the threads' values remains.
void atomic_max(float& target, int32_t magnitude);
// Stores the tile in the format of the arguments. `values` is not read for the tail.
void write_tile_cpu(const QuantizeArgs& args, const Tile& tile, const FloatTile& values);
void write_tile_cpu(const NvArgs& args, const Tile& tile, const FloatTile& values);

// Every tile of the matrix, on several threads.
template <typename Load, typename Use>
void for_each_tile_cpu(const Layout& layout, Load&& load, Use&& use) {
  at::parallel_for(0, layout.tiles(), 1, [&](int64_t begin, int64_t end) {
    FloatTile values;
    for (int64_t i = begin; i < end; ++i) {
      const Tile tile = tile_at(layout, i);
      if (is_left_out(layout, tile)) return;  // the tail comes last
      if (!tile.tail) load(tile, values);
      use(tile, values);
    }
  });
}

// Row-wise data of 1xN blocks, whose rows do not depend on each other, is computed in strips of 8 rows across
// the whole width, in memory order: the values of a strip stay in the L1 cache, and each row is a stream for
// the hardware prefetcher. NVFP4 is vectorized over rows, of which a strip has too few.
inline constexpr int kStripRows = 8;

inline bool uses_strips(const QuantizeArgs& args) {
  return !args.transposed && !args.layout.square && args.layout.granularity != ScaleGranularity::k128x128;
}
inline bool uses_strips(const NvArgs&) { return false; }

// Of each row tile.
inline int64_t strips_of(const Layout& layout) {
  return ceil_div(std::min<int64_t>(layout.rows, kTile), kStripRows);
}

// Strip `index` of a tile, as a tile whose `row_tile` counts strips, so that strip 0 begins the matrix.
inline Tile strip_at(Tile tile, int64_t index) {
  const int first = static_cast<int>(index) * kStripRows;
  tile.row_tile = tile.row_tile * (kTile / kStripRows) + static_cast<int32_t>(index);
  tile.row += first;
  tile.rows = std::clamp(tile.rows - first, 0, kStripRows);
  return tile;
}

template <typename Args, typename Load>
void quantize_strips_cpu(const Args& args, Load&& load) {
  const Layout& layout = args.layout;
  const int64_t strips = strips_of(layout), col_tiles = layout.col_tiles();
  if (col_tiles == 0) return;
  at::parallel_for(0, layout.matrices * layout.row_tiles() * strips, 1, [&](int64_t begin, int64_t end) {
    FloatTile values;
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < col_tiles; ++j) {
        const Tile strip = strip_at(tile_at(layout, i / strips * col_tiles + j), i % strips);
        if (is_left_out(layout, strip)) return;
        if (!strip.tail) load(strip, values);
        write_tile_cpu(args, strip, values);
      }
    }
  });
}

template <typename Args, typename Load>
void quantize_tiles_cpu(const Args& args, Load&& load) {
  if (uses_strips(args)) return quantize_strips_cpu(args, load);
  for_each_tile_cpu(args.layout, load,
                    [&](const Tile& tile, const FloatTile& values) { write_tile_cpu(args, tile, values); });
}

}  // namespace transformer_plugin::quantize
