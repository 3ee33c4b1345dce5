// RMSNorm and LayerNorm over the last dimension, n columns:
//   RMSNorm    y = (x * rstd) * gamma,                   rstd = 1 / sqrt(sum(x^2) / n + eps)
//   LayerNorm  y = ((x - mean) * rstd) * gamma + beta,   rstd = 1 / sqrt(sum((x - mean)^2) / n + eps)
// gamma is the weight, or 1 + weight if `zero_centered`. All in FP32, each operation rounded, y rounded once
// to the dtype. Squares are accumulated by fma.
//
// Sums over a row have a fixed order, so that results are deterministic and the same on CPU and CUDA: column
// c is added to partial sum c % 1024, in the order of columns, from zero; then neighbouring partial sums are
// added, then neighbours of those sums, and so on, ten times. Gradients of weight and bias are column sums in
// the order of common/column_sums.h.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/column_sums.h"
#include "common/dtype.h"
#include "common/math.h"

namespace transformer_plugin::norm {

inline constexpr int kPartialSums = 1024;

// LayerNorm is `centered`. RMSNorm is not, and its mean counts as 0.
struct NormArgs {
  const void* input;   // [rows, cols]
  const void* weight;  // [cols], or null for a gamma of 1
  const void* bias;    // [cols], or null for none
  float* mean;         // [rows], or null if not requested
  float* rstd;         // [rows], or null if not requested
  int64_t rows;
  int64_t cols;
  float eps;
  bool centered;
  bool zero_centered;
  DType dtype;
};

struct NormBackwardArgs {
  const void* grad;      // [rows, cols]
  const void* input;     // [rows, cols]
  const void* weight;    // [cols], or null
  const float* mean;     // [rows], or null for 0
  const float* rstd;     // [rows]
  void* grad_input;      // [rows, cols]
  ColumnSums of_weight;  // of grad times the normalised values; `sums` is null if not requested
  ColumnSums of_bias;    // of grad; likewise
  int64_t rows;
  int64_t cols;
  bool zero_centered;
  DType dtype;
};

TP_HOST_DEVICE float gamma_of(float weight, bool zero_centered) {
  return zero_centered ? 1.0f + weight : weight;
}

TP_HOST_DEVICE float reciprocal_root(float mean_square, float eps) { return 1.0f / sqrtf(mean_square + eps); }

// The gradient of an element of the input. `grad` is the gradient of its normalised value: that of the output
// times gamma. The means are over the row, of `grad` (0 unless centered) and of `grad` times the normalised
// value.
TP_HOST_DEVICE float input_gradient(float grad, float normalised, float rstd, float mean_grad,
                                    float mean_product) {
  return rstd * ((grad - mean_grad) - normalised * mean_product);
}

void norm_cpu(const NormArgs& args, void* output);
void norm_backward_cpu(const NormBackwardArgs& args);
void launch_norm(const NormArgs& args, void* output, void* stream);
void launch_norm_backward(const NormBackwardArgs& args, void* stream);

}  // namespace transformer_plugin::norm
