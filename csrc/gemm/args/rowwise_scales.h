// The epilogue of a GEMM of quantized operands with one scale for each row, as a separate step on the FP32
// result.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/math.h"

namespace transformer_plugin::gemm {

// out[i, n] = sums[i, n] * (a_scale[i] * b_scale[g, n]) * alpha[g] + bias_scale[i] * bias[g, n] for the rows
// i of group g. FP32, from left to right, the addition is an fma, rounded once. Rows past the last group are
// zero, or not written without `zero_tail`, and nothing is read for them.
struct RowwiseScaleArgs {
  const float* sums;        // [rows, n]
  void* out;                // [rows, n]; may be `sums` if it is float32
  const float* a_scale;     // [rows]
  const float* b_scale;     // [groups, n]
  const float* alpha;       // [groups], or null for 1
  const float* bias;        // [groups, n], or null
  const float* bias_scale;  // [rows], or null for 1
  const int32_t* offsets;   // [groups + 1], or null for one group of all rows
  int64_t rows;
  int64_t groups;
  int64_t n;
  DType out_dtype;
  bool zero_tail;

  TP_HOST_DEVICE int64_t written_rows() const {
    return offsets != nullptr && !zero_tail ? offsets[groups] : rows;
  }
};

// One element without bias.
TP_HOST_DEVICE float scaled_sum(float sum, float a_scale, float b_scale, float alpha) {
  return sum * (a_scale * b_scale) * alpha;
}

void scale_rowwise_cpu(const RowwiseScaleArgs& args);
void launch_scale_rowwise(const RowwiseScaleArgs& args, void* stream);

}  // namespace transformer_plugin::gemm
