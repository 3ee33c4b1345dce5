// What the CPU kernels of the quantize family share: a tile as floats, the walk over tiles, and storing one. A source is
// a function `load(tile, values)` that fills the tile's rows and columns with what is to be quantized, already rounded to
// the dtype of the input; it is not called for the tail.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <type_traits>

#include "quantize/args/quantize.h"
#include "quantize/args/quantize_nv.h"

namespace transformer_plugin::quantize {

// One tile as floats, row by row. Only what the tile has is ever set, and read: clearing all of it costs as much as
// everything else that a tiny matrix needs.
struct Values {
  alignas(64) float at[kTile][kTile];
};

// The largest |x| as bits, which order like the floats they are. NaN elements are left out.
TP_HOST_DEVICE int32_t magnitude(float value) {
  const int32_t bits = static_cast<int32_t>(float_to_bits(value) & 0x7fffffffu);
  return bits > 0x7f800000 ? 0 : bits;
}

// Whole tiles, which most are, have loops of a known length.
template <typename Fn>
TP_HOST_DEVICE void with_width(int cols, Fn&& fn) {
  cols == kTile ? fn(std::integral_constant<int, kTile>{}) : fn(cols);
}

// Asks for what lies to the right of a row of a tile, which comes next: rows are too far apart for a processor to foresee.
template <typename T>
TP_HOST_DEVICE void fetch_next(const T* row) {
  constexpr int kLine = 64 / sizeof(T);
  for (int c = kTile; c < 2 * kTile; c += kLine) __builtin_prefetch(row + c);
}

// A tile's part of a matrix with as many columns as the layout says.
void load_tile_cpu(const void* input, DType dtype, const Layout& layout, const Tile& tile, Values& values);
// Of the kernels' input.
template <typename Args>
void load_tile_cpu(const Args& args, const Tile& tile, Values& values) {
  load_tile_cpu(args.input, args.dtype, args.layout, tile, values);
}
// Codes of a tile, row by row, to its columns as lines `stride` apart.
void transpose(const uint8_t (*codes)[kTile], int rows, int cols, uint8_t* output, int64_t stride);
// The zeros around the tile in aligned lines of transposed data.
void zero_gaps(const QuantizeArgs& args, const Tile& tile);
int32_t magnitude_of_tile(const Tile& tile, const Values& values);
// Of several threads, the largest wins.
void raise_to(float& target, int32_t magnitude);
// The tile in the format of the arguments. Values of the tail count for nothing.
void write_tile_cpu(const QuantizeArgs& args, const Tile& tile, const Values& values);
void write_tile_cpu(const NvArgs& args, const Tile& tile, const Values& values);

// Every tile that holds values, on several threads.
template <typename Load, typename Use>
void for_each_tile_cpu(const Layout& layout, Load&& load, Use&& use) {
  at::parallel_for(0, layout.tiles(), 1, [&](int64_t begin, int64_t end) {
    Values values;
    for (int64_t i = begin; i < end; ++i) {
      const Tile tile = tile_at(layout, i);
      if (!tile.tail) load(tile, values);
      use(tile, values);
    }
  });
}

// Row-wise data of 1xN blocks, whose rows do not depend on each other, is made strip by strip across the whole width, in
// the order of memory. A strip has few rows, so that its values stay in the first cache and the processor sees each row as
// a stream. NVFP4 works on vectors of rows, of which a strip has too few.
inline constexpr int kStrip = 8;

inline bool goes_by_strips(const QuantizeArgs& args) {
  return !args.transposed && !args.layout.square && args.layout.mode != ScaleMode::kSquare;
}
inline bool goes_by_strips(const NvArgs&) { return false; }

// Of each row tile.
inline int64_t strips_of(const Layout& layout) {
  return ceil_div(std::min<int64_t>(layout.rows, kTile), kStrip);
}

// Strip `index` of a tile, as a tile whose row tile counts strips: the first begins the matrix.
inline Tile strip_at(Tile tile, int64_t index) {
  const int first = static_cast<int>(index) * kStrip;
  tile.row_tile = tile.row_tile * (kTile / kStrip) + static_cast<int32_t>(index);
  tile.row += first;
  tile.rows = std::clamp(tile.rows - first, 0, kStrip);
  return tile;
}

template <typename Args, typename Load>
void quantize_strips_cpu(const Args& args, Load&& load) {
  const Layout& layout = args.layout;
  const int64_t strips = strips_of(layout), col_tiles = layout.col_tiles();
  if (col_tiles == 0) return;
  at::parallel_for(0, layout.members * layout.row_tiles() * strips, 1, [&](int64_t begin, int64_t end) {
    Values values;
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < col_tiles; ++j) {
        const Tile strip = strip_at(tile_at(layout, i / strips * col_tiles + j), i % strips);
        if (!strip.tail) load(strip, values);
        write_tile_cpu(args, strip, values);
      }
    }
  });
}

template <typename Args, typename Load>
void quantize_tiles_cpu(const Args& args, Load&& load) {
  if (goes_by_strips(args)) return quantize_strips_cpu(args, load);
  for_each_tile_cpu(args.layout, load,
                    [&](const Tile& tile, const Values& values) { write_tile_cpu(args, tile, values); });
}

}  // namespace transformer_plugin::quantize
