// Quantization to FP8 and MXFP8 on a CPU, per-tensor scales, and the table of row tiles.
#include <algorithm>

#include "common/visit_float.h"
#include "quantize/cpu/tile.h"

namespace transformer_plugin::quantize {
namespace {

template <typename T>
TP_CPU_CLONES void load_rows(const T* input, int64_t stride, int rows, int cols, FloatTile& values) {
  for (int r = 0; r < rows; ++r) {
    const T* row = input + r * stride;
    prefetch_next(row);
    for (int c = 0; c < cols; ++c) values.at[r][c] = static_cast<float>(row[c]);
  }
}

template <typename T>
void load(const void* matrix, const Layout& layout, const Tile& tile, FloatTile& values) {
  const T* input =
      static_cast<const T*>(matrix) + (tile.matrix * layout.rows + tile.row) * layout.cols + tile.col;
  load_rows<T>(input, layout.cols, tile.rows, tile.cols, values);
}

}  // namespace

void tensor_scales_cpu(const QuantizeArgs& args) {
  if (args.layout.granularity != ScaleGranularity::kPerTensor) return;
  for (int64_t i = 0; i < args.layout.tensor_scales(); ++i) {
    const float scale_inv = 1.0f / tensor_scale(args, i);
    if (args.rowwise) args.scale[i] = scale_inv;
    if (args.transposed) args.scale_t[i] = scale_inv;
  }
}

void row_tiles_cpu(const int32_t* offsets, int64_t groups, const RowTables& tables) {
  int32_t* begins = tables.offsets;
  int32_t* tile_offsets = begins + tables.groups + 1;
  begins[0] = tile_offsets[0] = 0;
  bool even = true;
  for (int64_t g = 0; g < tables.groups; ++g) {
    begins[g + 1] = offsets[tables.merged ? groups : g + 1];
    even = even && (begins[g + 1] % kAlignedRows == 0 || begins[g + 1] == tables.rows);
    tile_offsets[g + 1] = tile_offsets[g] + static_cast<int32_t>(ceil_div(begins[g + 1] - begins[g], kTile));
  }
  const int64_t count = Layout::row_tiles(tables.rows, tables.groups);
  for (int64_t i = 0; i < count; ++i) {
    tables.table[i] =
        row_tile_at(begins, tile_offsets, tables.groups, tables.tiled_rows(begins[tables.groups]), even, i);
  }
}

void load_tile_cpu(const void* input, DType dtype, const Layout& layout, const Tile& tile,
                   FloatTile& values) {
  visit_float(dtype, [&](auto type) { load<decltype(type)>(input, layout, tile, values); });
}

void quantize_cpu(const QuantizeArgs& args) {
  if (args.is_noop()) return;
  tensor_scales_cpu(args);
  quantize_tiles_cpu(args, [&](const Tile& tile, FloatTile& values) { load_tile_cpu(args, tile, values); });
}

}  // namespace transformer_plugin::quantize
