#include <algorithm>

#include "norm/norm_cpu.h"
#include "norm/norm_quantize.h"
#include "quantize/tile_cpu.h"

namespace transformer_plugin::norm {

namespace {

// A band of 128 rows at a time: their sums, then the tiles of the band, from what the cache still holds.
template <typename Output>
void quantize_bands(const NormArgs& args, const Output& output) {
  const quantize::Layout& layout = output.layout;
  at::parallel_for(0, layout.row_tiles(), 1, [&](int64_t begin, int64_t end) {
    quantize::Values values;
    RowStats stats[quantize::kTile];
    for (int64_t band = begin; band < end; ++band) {
      const int64_t first = band * quantize::kTile;
      const int64_t rows = std::min<int64_t>(quantize::kTile, args.rows - first);
      for (int64_t r = 0; r < rows; ++r) stats[r] = stats_of_row_cpu(args, first + r);
      for (int64_t i = 0; i < layout.col_tiles(); ++i) {
        const quantize::Tile tile = tile_at(layout, band * layout.col_tiles() + i);
        for (int r = 0; r < tile.rows; ++r) {
          normalise_cpu(args, stats[r], tile.row + r, tile.col, tile.cols, values.at[r]);
        }
        write_tile_cpu(output, tile, values);
      }
    }
  });
}

}  // namespace

void norm_quantize_cpu(const NormArgs& args, const QuantizeArgs& output) {
  tensor_scales_cpu(output);
  quantize_bands(args, output);
}
void norm_quantize_cpu(const NormArgs& args, const NvArgs& output) { quantize_bands(args, output); }

}  // namespace transformer_plugin::norm
