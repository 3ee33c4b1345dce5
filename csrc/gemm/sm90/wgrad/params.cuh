// Arguments and tensor maps of the weight gradient kernels.
#pragma once

#include <cuda.h>

#include "gemm/args/kernel_args.h"

namespace transformer_plugin::gemm::sm90 {

// a = grad and b = input in GroupedGemmArgs; the sum runs over tokens (T).
struct WgradParams {
  const int32_t* offsets;                 // [groups + 1]; null for one group of all tokens
  const float* alpha;                     // [groups], or null for 1
  const float* beta;                      // [groups], factor of what `out` contains; or null for 0
  void* out;                              // [groups, m, n], strides in elements below
  const float *grad_scale, *input_scale;  // FP8 with one scale for each group (kGroup): [groups]
  int64_t group_stride, row_stride;
  int groups, tokens, m, n;         // tokens: T
  uint32_t boxes_added_by_threads;  // Sm90Config::boxes_added_by_threads
  bool accumulate;                  // add to what `out` contains
  bool read_all_group_aligned;  // FP8: all groups are read from grad_group_aligned and input_group_aligned
  // Outputs that are a list of matrices instead of `out`: their tensor maps and addresses; or null.
  const CUtensorMap* out_maps;
  void* const* outs;
};

struct WgradTensorMaps {
  CUtensorMap grad, input;
  // FP8: the operands in the `aligned` layout (align_groups.h), in which groups begin at multiples of 32
  // bytes.
  CUtensorMap grad_group_aligned, input_group_aligned;
  CUtensorMap grad_scale, input_scale;  // FP8 block scales: [token blocks, m] and [token blocks, n]
  CUtensorMap out;
};

// The tokens of a group.
struct GroupTokens {
  int begin, end;
};

}  // namespace transformer_plugin::gemm::sm90
