// The gradients of a bias per group and of its scale per row:
//   grad_bias[g, j] = sum of grad[i, j] * bias_scale[i] over the rows i of group g
//   grad_bias_scale[i] = sum of grad[i, j] * bias[g, j] over the columns j; zero past the last group.
// FP32 sums in a written order, so they repeat bit for bit and are the same on CPU and CUDA. Of a column: the group's
// rows in chunks of kChunkRows, each chunk added in turn from zero, then the chunks in turn from zero. Of a row:
// lane l of kLanes adds columns l, l + kLanes, ... in turn; then lanes are folded in halves.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace transformer_plugin::gemm {

inline constexpr int kChunkRows = 128;
inline constexpr int kLanes = 32;

struct GroupedBiasBackwardArgs {
  const void* grad;         // [T, N]
  const int32_t* offsets;   // [G + 1]
  const float* bias;        // [G, N], or null: no gradient of the scale
  const float* bias_scale;  // [T], or null for 1
  float* partial;           // [tile_slots(T, G, kChunkRows), N]: the sum of each chunk
  float* grad_bias;         // [G, N]
  float* grad_bias_scale;   // [T], or null
  int64_t rows;
  int64_t columns;
  int64_t groups;
  DType dtype;
};

void grouped_bias_backward_cpu(const GroupedBiasBackwardArgs& args);
void launch_grouped_bias_backward(const GroupedBiasBackwardArgs& args, void* stream);

}  // namespace transformer_plugin::gemm
