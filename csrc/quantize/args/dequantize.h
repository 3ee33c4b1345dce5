// Back to floats: float(q) * scale_inv in FP32, then rounded to the output's dtype; of NVFP4 as quantize_nv.h says. The
// tail of a ragged matrix is zero.
#pragma once

#include "common/e8m0.h"
#include "common/fp8.h"
#include "quantize/args/quantize_nv.h"

namespace transformer_plugin::quantize {

struct DequantizeArgs {
  const uint8_t*
      data;  // [members, rows, cols], or [members, cols, rows] when transposed; contiguous. kNv: two in a byte
  const void* scale;  // float32, or E8M0 of ScaleMode::kMx, E4M3 of kNv
  void* output;       // [members, rows, cols] either way
  Layout layout;      // of the output
  bool transposed;
  DType dtype;
  DType element;
  // Of ScaleMode::kNv.
  const float*
      amax;          // what the data was scaled by; null to leave it out, for products that bring it in later
  float nv_inverse;  // 1 / (bound * 6)
  bool row_scaled;
};

// What line `line` of the tile was scaled by.
TP_HOST_DEVICE float nv_amax(const DequantizeArgs& args, const Tile& tile, int line) {
  int64_t index = tile.group;
  if (args.row_scaled) {
    index = args.transposed ? tile.group * args.layout.cols + tile.col + line
                            : tile.member * args.layout.rows + tile.row + line;
  }
  return args.amax[index];
}

// What a code is multiplied by, from its block's scale. A product that float32 cannot hold is taken in double: divided by
// bound * 6 it is a float again, and 6 times it at most the amax.
TP_HOST_DEVICE float nv_factor(float scale, float amax, float inverse) {
  const float product = scale * amax;
  if (fabsf(product) <= kLargestFloat || !(fabsf(amax) <= kLargestFloat)) return product * inverse;
  const double bound = inverse > 1.0f / 2000.0f ? 1536.0 : 2688.0;
  return static_cast<float>(static_cast<double>(scale) * amax / bound);
}
TP_HOST_DEVICE float nv_factor(const DequantizeArgs& args, float amax, uint8_t scale) {
  return nv_factor(nv_e4m3_to_float(scale), amax, args.nv_inverse);
}
TP_HOST_DEVICE float nv_factor(const DequantizeArgs& args, const Tile& tile, int line, uint8_t scale) {
  return args.amax ? nv_factor(args, nv_amax(args, tile, line), scale) : nv_e4m3_to_float(scale);
}

// The scale of row `r`, column `c` of the tile.
TP_HOST_DEVICE float scale_at(const DequantizeArgs& args, const Tile& tile, int r, int c) {
  if (args.layout.mode != ScaleMode::kMx) {
    return static_cast<const float*>(args.scale)[scale_index(args.layout, tile, args.transposed, r, c)];
  }
  const int line = args.transposed ? c : r;
  const int block = (args.transposed ? r : c) / kMxBlock;
  return e8m0_to_float(static_cast<const uint8_t*>(
      args.scale)[WordLines(args.layout, tile, args.transposed).at(line) + block]);
}

void dequantize_cpu(const DequantizeArgs& args);
// Data along rows, not of the tail: the values of a tile, rounded to the output's dtype.
void dequantize_tile_cpu(const DequantizeArgs& args, const Tile& tile, float (*values)[kTile]);
void launch_dequantize(const DequantizeArgs& args, void* stream);
// FP8 along rows, where they are whole vectors; false where it does not take them.
bool launch_dequantize_rows(const DequantizeArgs& args, void* stream);
void launch_dequantize_nv(const DequantizeArgs& args, void* stream);

}  // namespace transformer_plugin::quantize
