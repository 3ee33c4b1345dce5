// Norms quantized along rows on a CPU.
#include <algorithm>

#include "norm/norm_cpu.h"
#include "norm/norm_quantize.h"
#include "quantize/cpu/tile.h"

namespace transformer_plugin::norm {

namespace {

// A strip of rows at a time, 8 or 128 rows high: the statistics of its rows, then its tiles, which are still
// in the cache.
template <typename Output>
void quantize_strips(const NormArgs& args, const Output& output) {
  const quantize::Layout& layout = output.layout;
  const bool by_strips = uses_strips(output);
  const int64_t height = by_strips ? quantize::kStripRows : quantize::kTile, col_tiles = layout.col_tiles();
  at::parallel_for(0, ceil_div(args.rows, height), 1, [&](int64_t begin, int64_t end) {
    quantize::FloatTile values;
    RowStats stats[quantize::kTile];
    for (int64_t strip = begin; strip < end; ++strip) {
      const int64_t first = strip * height, rows = std::min(height, args.rows - first);
      for (int64_t r = 0; r < rows; ++r) stats[r] = stats_of_row_cpu(args, first + r);
      for (int64_t i = 0; i < col_tiles; ++i) {
        quantize::Tile tile = tile_at(layout, first / quantize::kTile * col_tiles + i);
        if (by_strips) tile = strip_at(tile, first % quantize::kTile / quantize::kStripRows);
        normalise_cpu(args, stats, {tile.row, tile.col, tile.rows, tile.cols}, values);
        write_tile_cpu(output, tile, values);
      }
    }
  });
}

}  // namespace

void norm_quantize_cpu(const NormArgs& args, const QuantizeArgs& output) {
  tensor_scales_cpu(output);
  quantize_strips(args, output);
}
void norm_quantize_cpu(const NormArgs& args, const NvArgs& output) { quantize_strips(args, output); }

}  // namespace transformer_plugin::norm
