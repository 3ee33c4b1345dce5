// Back to floats: float(q) * scale_inv in FP32, then rounded to the output's dtype. The tail of a ragged matrix is
// zero.
#pragma once

#include "common/e8m0.h"
#include "common/fp8.h"
#include "quantize/tiles.h"

namespace transformer_plugin::quantize {

struct DequantizeArgs {
  const uint8_t* data;  // [members, rows, cols], or [members, cols, rows] when transposed; contiguous
  const void* scale;    // float32, or E8M0 of ScaleMode::kMx
  void* output;         // [members, rows, cols] either way
  Layout layout;        // of the output
  bool transposed;
  DType dtype;
  DType element;
};

// The scale of row `r`, column `c` of the tile.
TP_HOST_DEVICE float scale_at(const DequantizeArgs& args, const Tile& tile, int r, int c) {
  if (args.layout.mode != ScaleMode::kMx) {
    return static_cast<const float*>(args.scale)[scale_index(args.layout, tile, args.transposed, r, c)];
  }
  const int line = args.transposed ? c : r;
  const int block = (args.transposed ? r : c) / kMxBlock;
  return e8m0_to_float(static_cast<const uint8_t*>(
      args.scale)[mx_word_index(args.layout, tile, args.transposed, line) + block]);
}

void dequantize_cpu(const DequantizeArgs& args);
void launch_dequantize(const DequantizeArgs& args, void* stream);

}  // namespace transformer_plugin::quantize
