// The CUDA side of score.h: what one row's scores need of the whole row, one warp a row.
#pragma once

#include "common/device_types.cuh"
#include "common/launch.cuh"
#include "routing/score.h"

namespace transformer_plugin::routing {

static_assert(kScoreLanes == kWarpSize, "a lane of the written sum is a lane of the warp");

// Folds the lanes in halves; every lane gets the sum.
__device__ __forceinline__ float fold_lanes(float sum) {
  for (int half = kWarpSize / 2; half > 0; half /= 2) sum = sum + __shfl_down_sync(0xffffffffu, sum, half);
  return __shfl_sync(0xffffffffu, sum, 0);
}

template <typename T>
__device__ __forceinline__ RowScale row_scale(ScoreFunction function, const T* logits, int64_t experts) {
  const int lane = threadIdx.x % kWarpSize;
  RowScale row{-INFINITY, 0.0f};
  if (function != ScoreFunction::kSoftmax) {
    for (int64_t e = lane; e < experts; e += kWarpSize)
      row.sum = row.sum + score_of(function, to_float(logits[e]));
    row.sum = fold_lanes(row.sum) + kScoreEpsilon;
    return row;
  }
  for (int64_t e = lane; e < experts; e += kWarpSize) row.max = max_or_nan(row.max, to_float(logits[e]));
  for (int half = kWarpSize / 2; half > 0; half /= 2) {
    row.max = max_or_nan(row.max, __shfl_xor_sync(0xffffffffu, row.max, half));
  }
  for (int64_t e = lane; e < experts; e += kWarpSize) {
    row.sum = row.sum + softmax_term(to_float(logits[e]), row.max);
  }
  row.sum = fold_lanes(row.sum);
  return row;
}

}  // namespace transformer_plugin::routing
