// The gradients of a bias per group and of its scale per row:
//   grad_bias[g, j] = sum of grad[i, j] * bias_scale[i] over the rows i of group g
//   grad_bias_scale[i] = sum of grad[i, j] * bias[g, j] over the columns j; zero past the last group.
// FP32 sums in a fixed order, so results are reproducible and equal on CPU and CUDA. Column sums: the order
// of common/column_sums.h, of products rounded to FP32. Row sums: lane l of kLanes adds columns l, l +
// kLanes, ...; then the lanes are added pairwise (l and l + kLanes / 2, and so on).
#pragma once

#include "common/column_sums.h"
#include "common/dtype.h"

namespace transformer_plugin::gemm {

inline constexpr int kLanes = 32;

struct GroupedBiasBackwardArgs {
  const void* grad;         // [T, N]
  const float* bias;        // [G, N], or null: no gradient of the scale
  const float* bias_scale;  // [T], or null for 1
  ColumnSums sums;          // T rows and N columns; without offsets, no groups
  float* grad_bias_scale;   // [T], or null
  DType dtype;
};

void grouped_bias_backward_cpu(const GroupedBiasBackwardArgs& args);
void launch_grouped_bias_backward(const GroupedBiasBackwardArgs& args, void* stream);

}  // namespace transformer_plugin::gemm
