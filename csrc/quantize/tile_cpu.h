// What the CPU kernels of the quantize family share: a tile as floats, the walk over tiles, and storing one. A source is
// a function `load(tile, values)` that fills the tile's rows and columns with what is to be quantized, already rounded to
// the dtype of the input; it is not called for the tail.
#pragma once

#include <ATen/Parallel.h>

#include "quantize/quantize.h"
#include "quantize/quantize_nv.h"

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

// A tile's part of a matrix with as many columns as the layout says.
void load_tile_cpu(const void* input, DType dtype, const Layout& layout, const Tile& tile, Values& values);
// Of the kernels' input.
template <typename Args>
void load_tile_cpu(const Args& args, const Tile& tile, Values& values) {
  load_tile_cpu(args.input, args.dtype, args.layout, tile, values);
}
// Codes of a tile to lines `stride` apart.
void transpose(const uint8_t (*codes)[kTile], int rows, int cols, uint8_t* output, int64_t stride);
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

template <typename Args, typename Load>
void quantize_tiles_cpu(const Args& args, Load&& load) {
  for_each_tile_cpu(args.layout, load,
                    [&](const Tile& tile, const Values& values) { write_tile_cpu(args, tile, values); });
}

}  // namespace transformer_plugin::quantize
