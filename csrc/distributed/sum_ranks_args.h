// Arguments of the kernels of the sum over ranks, without torch.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/math.h"

namespace transformer_plugin::distributed {

// output[t, h] = sum over ranks r = 0, 1, ... of partials[r, t, h], in FP32 (FP64 for float64), starting at
// zero, times `factor`, rounded once. With `accumulate` that is added to output[t, h] before it is rounded.
// The partial sum of rank `own_rank` may lie elsewhere, at `own`; `partials` then has those of the other ranks.
struct SumRanksArgs {
  const void* partials;  // [ranks, partial_rows, width], or one less
  void* output;          // [rows, width]
  int64_t ranks;
  int64_t partial_rows;
  int64_t rows;
  int64_t width;
  DType dtype;      // of partials
  DType out_dtype;  // the same, or float32
  bool accumulate;
  float factor = 1;
  const void* own = nullptr;
  int64_t own_rank = 0;

  template <typename T>
  TP_HOST_DEVICE const T* partial(int64_t rank) const {
    if (own && rank == own_rank) return static_cast<const T*>(own);
    const int64_t place = own && rank > own_rank ? rank - 1 : rank;
    return static_cast<const T*>(partials) + place * partial_rows * width;
  }
};
void sum_ranks_cpu(const SumRanksArgs& args);
void launch_sum_ranks(const SumRanksArgs& args, void* stream);

}  // namespace transformer_plugin::distributed
