// Back to floats: float(q) * scale_inv in FP32, then rounded to the output's dtype. The tail of a ragged matrix is
// zero.
#pragma once

#include "common/fp8.h"
#include "quantize/tiles.h"

namespace transformer_plugin::quantize {

struct DequantizeArgs {
  const uint8_t* data;  // [members, rows, cols], or [members, cols, rows] when transposed; contiguous
  const float* scale;
  void* output;   // [members, rows, cols] either way
  Layout layout;  // of the output
  bool transposed;
  DType dtype;
  DType element;
};

void dequantize_cpu(const DequantizeArgs& args);
void launch_dequantize(const DequantizeArgs& args, void* stream);

}  // namespace transformer_plugin::quantize
