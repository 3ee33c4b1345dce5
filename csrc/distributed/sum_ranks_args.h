// Arguments of the kernels of the sum over ranks, without torch.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/math.h"

namespace transformer_plugin::distributed {

// output[t, h] = sum over ranks r = 0, 1, ... of parts[r, t, h], in FP32 (FP64 for float64), starting at
// zero, times `factor`, rounded once. With `accumulate` that is added to output[t, h] before it is rounded.
struct SumRanksArgs {
  const void* parts;  // [ranks, part_rows, width]
  void* output;       // [rows, width]
  int64_t ranks;
  int64_t part_rows;
  int64_t rows;
  int64_t width;
  DType dtype;      // of parts
  DType out_dtype;  // the same, or float32
  bool accumulate;
  float factor = 1;
};
void sum_ranks_cpu(const SumRanksArgs& args);
void launch_sum_ranks(const SumRanksArgs& args, void* stream);

}  // namespace transformer_plugin::distributed
