// FP8 rows under one FP32 scale each: the rule of quantize.h with a row as its block, and the largest float32 for a scale
// that FP32 cannot hold.
#pragma once

#include "quantize/args/quantize.h"

namespace transformer_plugin::quantize {

struct QuantizeRowwiseArgs {
  const void* input;  // [rows, cols] contiguous
  uint8_t* codes;     // [rows, cols]
  float* scale;       // [rows], of decoding
  int64_t rows;
  int64_t cols;
  ScaleRule rule;
  DType dtype;
  DType element;
};

void quantize_rowwise_cpu(const QuantizeRowwiseArgs& args);
void launch_quantize_rowwise(const QuantizeRowwiseArgs& args, void* stream);

}  // namespace transformer_plugin::quantize
