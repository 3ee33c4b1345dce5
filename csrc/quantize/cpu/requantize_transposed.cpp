#include "quantize/args/requantize_transposed.h"

#include <algorithm>

#include "quantize/cpu/tile.h"

namespace transformer_plugin::quantize {
namespace {

void turn_tile(const RequantizeArgs& args, const Tile& tile) {
  const Layout& layout = args.to.layout;
  alignas(64) uint8_t codes[kTile][kTile];
  for (int r = 0; r < tile.rows; ++r) {
    const uint8_t* source =
        args.from.data + (tile.member * layout.rows + tile.row + r) * layout.cols + tile.col;
    tile.tail ? std::fill_n(codes[r], tile.cols, uint8_t{0}) : std::copy_n(source, tile.cols, codes[r]);
  }
  uint8_t* line = args.to.data_t + (tile.member * layout.cols + tile.col) * layout.line_length();
  transpose(codes, tile.rows, tile.cols, line + line_begin(layout, tile), layout.line_length());
  zero_gaps(args.to, tile);
}

template <typename Args>
void requantize_tiles(const Args& args) {
  quantize_tiles_cpu(
      args.to, [&](const Tile& tile, Values& values) { dequantize_tile_cpu(args.from, tile, values.at); });
}

}  // namespace

void requantize_transposed_cpu(const RequantizeArgs& args) {
  const Layout& layout = args.to.layout;
  if (layout.mode == ScaleMode::kTensor) {
    at::parallel_for(0, layout.tiles(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) turn_tile(args, tile_at(layout, i));
    });
    return;
  }
  requantize_tiles(args);
}

void requantize_transposed_cpu(const RequantizeNvArgs& args) { requantize_tiles(args); }

}  // namespace transformer_plugin::quantize
