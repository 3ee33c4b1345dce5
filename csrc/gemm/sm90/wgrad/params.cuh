// Arguments and tensor maps of the weight gradient kernels.
#pragma once

#include <cuda.h>

#include "gemm/args/kernel_args.h"

namespace transformer_plugin::gemm::sm90 {

struct WgradParams {
  const int32_t* offsets;          // [groups + 1]; null for one group of all rows
  const float* alpha;              // [groups], or null for 1
  const float* beta;               // [groups], factor of what `out` contains; or null for 0
  void* out;                       // [groups, m, n], strides in elements below
  const float *a_scale, *b_scale;  // FP8 with one scale for each group: [groups], of grad and of input
  int64_t group_stride, row_stride;
  int groups, rows, m, n;
  uint32_t thread_boxes;  // Sm90Config::thread_boxes
  bool accumulate;        // add to what `out` contains
  bool all_realigned;     // FP8: all groups are read from the realigned copies of the operands
  // Outputs that are a list of matrices instead of `out`: their tensor maps and addresses; or null.
  const CUtensorMap* out_maps;
  void* const* outs;
};

struct WgradTensorMaps {
  CUtensorMap grad, input;
  CUtensorMap grad_realigned, input_realigned;  // FP8: copies in which groups begin at multiples of 16 bytes
  CUtensorMap grad_scale, input_scale;          // FP8 block scales: [row tiles, m] and [row tiles, n]
  CUtensorMap out;
};

// The rows of a group, and the index of the group's first row tile (ScaleRowTiles).
struct GroupRows {
  int begin, end;
  int first_tile;
};

}  // namespace transformer_plugin::gemm::sm90
