// From FP32 sums of products of codes to rows of an output, for operands with a scale for each row.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/math.h"

namespace transformer_plugin::gemm {

// out[i, n] = sums[i, n] * (a_scale[i] * b_scale[g, n]) * alpha[g] + bias_scale[i] * bias[g, n] for the rows i of group g, in
// FP32 and from left to right, the last step one fma, rounded once; zero past the last group, where nothing is read.
struct RowwiseScaleArgs {
  const float* sums;        // [rows, n]
  void* out;                // the same; `sums` itself, if it is float32
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
};

// One element, without the bias.
TP_HOST_DEVICE float scaled_sum(float sum, float a_scale, float b_scale, float alpha) {
  return sum * (a_scale * b_scale) * alpha;
}

void scale_rowwise_cpu(const RowwiseScaleArgs& args);
void launch_scale_rowwise(const RowwiseScaleArgs& args, void* stream);

}  // namespace transformer_plugin::gemm
