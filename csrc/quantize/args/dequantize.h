// Dequantization: float(q) * scale_inv in FP32, rounded to the output's dtype; for NVFP4 the formula is in
// quantize_nv.h. The tail of a ragged matrix is zero.
#pragma once

#include "common/e8m0.h"
#include "common/fp8.h"
#include "quantize/args/quantize_nv.h"

namespace transformer_plugin::quantize {

struct DequantizeArgs {
  // [matrices, rows, cols], or [matrices, cols, rows] if transposed; contiguous. NVFP4: two elements per
  // byte.
  const uint8_t* data;
  const void* scale;  // float32; E8M0 for k1x32, E4M3 for k1x16
  void* output;       // [matrices, rows, cols] in both directions
  Layout layout;      // of the output
  bool transposed;
  DType dtype;
  DType element;
  // For ScaleGranularity::k1x16.
  const float* amax;  // the amax that the data was scaled by; null for gemm ops that apply it later
  float nv_inverse;   // 1 / (bound * 6)
  bool row_scaled;
};

// The amax that row `data_row` of the tile's data was scaled by: a row of the tile, or a column for
// transposed data.
TP_HOST_DEVICE float nv_amax(const DequantizeArgs& args, const Tile& tile, int data_row) {
  int64_t index = tile.group;
  if (args.row_scaled) {
    index = args.transposed ? tile.group * args.layout.cols + tile.col + data_row
                            : tile.matrix * args.layout.rows + tile.row + data_row;
  }
  return args.amax[index];
}

// The factor of a block's elements. If the product is not finite in float32 it is computed in double: divided
// by bound * 6 it is a float again, and 6 times it at most the amax.
TP_HOST_DEVICE float nv_factor(float scale, float amax, float inverse) {
  const float product = scale * amax;
  if (fabsf(product) <= kLargestFloat || !(fabsf(amax) <= kLargestFloat)) return product * inverse;
  const double bound = inverse > 1.0f / 2000.0f ? 1536.0 : 2688.0;
  return static_cast<float>(static_cast<double>(scale) * amax / bound);
}
TP_HOST_DEVICE float nv_factor(const DequantizeArgs& args, float amax, uint8_t scale) {
  return nv_factor(nv_e4m3_to_float(scale), amax, args.nv_inverse);
}
TP_HOST_DEVICE float nv_factor(const DequantizeArgs& args, const Tile& tile, int data_row, uint8_t scale) {
  return args.amax ? nv_factor(args, nv_amax(args, tile, data_row), scale) : nv_e4m3_to_float(scale);
}

// The scale of row `r`, column `c` of the tile.
TP_HOST_DEVICE float scale_at(const DequantizeArgs& args, const Tile& tile, int r, int c) {
  if (args.layout.granularity != ScaleGranularity::k1x32) {
    return static_cast<const float*>(args.scale)[scale_index(args.layout, tile, args.transposed, r, c)];
  }
  const int data_row = args.transposed ? c : r;
  const int block = (args.transposed ? r : c) / kMxBlock;
  return e8m0_to_float(static_cast<const uint8_t*>(
      args.scale)[ScaleWords(args.layout, tile, args.transposed).at(data_row) + block]);
}

void dequantize_cpu(const DequantizeArgs& args);
// The values of a tile of row-wise data, rounded to the output's dtype. Not for the tail.
void dequantize_tile_cpu(const DequantizeArgs& args, const Tile& tile, float (*values)[kTile]);
void launch_dequantize(const DequantizeArgs& args, void* stream);
// Row-wise FP8 data with rows of whole vectors. Returns false, without a launch, for other arguments.
bool launch_dequantize_rows(const DequantizeArgs& args, void* stream);
void launch_dequantize_nv(const DequantizeArgs& args, void* stream);

}  // namespace transformer_plugin::quantize
