// The arguments of the fp8_row kernels: FP8 data with one FP32 scale per row. The rule is that of quantize.h
// with the row as the block; a scale that FP32 cannot hold becomes the largest float32.
#pragma once

#include "quantize/args/quantize.h"

namespace transformer_plugin::quantize {

struct QuantizeRowsArgs {
  const void* input;  // [rows, cols], contiguous
  uint8_t* data;      // [rows, cols]
  float* scale;       // [rows], the inverse scales
  int64_t rows;
  int64_t cols;
  ScaleRule rule;
  DType dtype;
  DType element;
  const int32_t* end;  // rows from `*end` on get data and scales of zero; null if there are none
  const float* noop;   // if *noop is 1, nothing is written; may be null
  bool zero_tail;      // if false, rows from `*end` on are not written

  TP_HOST_DEVICE int64_t used_rows() const { return end != nullptr ? *end : rows; }
  TP_HOST_DEVICE int64_t written_rows() const { return zero_tail ? rows : used_rows(); }
  TP_HOST_DEVICE bool is_noop() const { return noop != nullptr && *noop == 1.0f; }
};

void quantize_rows_cpu(const QuantizeRowsArgs& args);
void launch_quantize_rows(const QuantizeRowsArgs& args, void* stream);

}  // namespace transformer_plugin::quantize
