// bias_backward_quantize on a CPU: each tile is quantized and its columns are summed.
#include "quantize/args/bias_backward_quantize.h"

#include <algorithm>

#include "quantize/cpu/tile.h"

namespace transformer_plugin::quantize {

namespace {

template <typename Args>
void quantize_and_sum(const Args& args, const ColumnSums& sums) {
  at::parallel_for(0, args.layout.tiles(), 1, [&](int64_t begin, int64_t end) {
    FloatTile values;
    for (int64_t i = begin; i < end; ++i) {
      const Tile tile = tile_at(args.layout, i);
      if (is_left_out(args.layout, tile)) return;
      if (!tile.tail) load_tile_cpu(args, tile, values);
      write_tile_cpu(args, tile, values);
      if (tile.tail || tile.rows == 0) continue;
      sum_rows_cpu(values.at[0], kTile, tile.rows, tile.cols);
      std::copy_n(values.at[0], tile.cols, sums.of_tile(tile.group, tile.row) + tile.col);
    }
  });
  add_tile_sums_cpu(sums);
}

}  // namespace

void bias_backward_quantize_cpu(const QuantizeArgs& args, const ColumnSums& sums) {
  tensor_scales_cpu(args);
  quantize_and_sum(args, sums);
}
void bias_backward_quantize_cpu(const NvArgs& args, const ColumnSums& sums) { quantize_and_sum(args, sums); }

}  // namespace transformer_plugin::quantize
