// requantize_transposed on a CPU.
#include "quantize/args/requantize_transposed.h"

#include <algorithm>

#include "quantize/cpu/tile.h"

namespace transformer_plugin::quantize {
namespace {

void transpose_tile(const RequantizeArgs& args, const Tile& tile) {
  const Layout& layout = args.to.layout;
  if (tile.rows == 0) return;  // of an empty group
  alignas(64) uint8_t bytes[kTile][kTile];
  for (int r = 0; r < tile.rows; ++r) {
    const uint8_t* source =
        args.from.data + (tile.matrix * layout.rows + tile.row + r) * layout.cols + tile.col;
    tile.tail ? std::fill_n(bytes[r], tile.cols, uint8_t{0}) : std::copy_n(source, tile.cols, bytes[r]);
  }
  uint8_t* target = args.to.data_t + (tile.matrix * layout.cols + tile.col) * layout.transposed_row_length();
  transpose(bytes, tile.rows, tile.cols, target + transposed_begin(layout, tile),
            layout.transposed_row_length());
  zero_gaps(args.to, tile);
}

template <typename Args>
void requantize_tiles(const Args& args) {
  quantize_tiles_cpu(
      args.to, [&](const Tile& tile, FloatTile& values) { dequantize_tile_cpu(args.from, tile, values.at); });
}

}  // namespace

void requantize_transposed_cpu(const RequantizeArgs& args) {
  const Layout& layout = args.to.layout;
  if (layout.granularity == ScaleGranularity::kPerTensor) {
    at::parallel_for(0, layout.tiles(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) transpose_tile(args, tile_at(layout, i));
    });
    return;
  }
  requantize_tiles(args);
}

void requantize_transposed_cpu(const RequantizeNvArgs& args) { requantize_tiles(args); }

}  // namespace transformer_plugin::quantize
