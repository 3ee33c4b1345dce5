// Scores of a whole row on CUDA, one warp per row (score.h).
#pragma once

#include "common/device_types.cuh"
#include "common/launch.cuh"
#include "routing/score.h"

namespace transformer_plugin::routing {

static_assert(kScoreLanes == kWarpSize, "a lane of the written sum is a lane of the warp");

// Adds the lanes of a warp as a tree of halves; every lane gets the sum.
template <typename T>
__device__ __forceinline__ T fold_lanes(T sum) {
  for (int half = kWarpSize / 2; half > 0; half /= 2) sum = sum + __shfl_down_sync(0xffffffffu, sum, half);
  return __shfl_sync(0xffffffffu, sum, 0);
}

// The shift of a whole row, without the sum.
template <typename T>
__device__ __forceinline__ RowScale row_shift(ScoreFunction function, const T* logits, int64_t experts) {
  float max = -INFINITY;
  for (int64_t e = threadIdx.x % kWarpSize; e < experts; e += kWarpSize) {
    max = max_or_nan(max, to_float(logits[e]));
  }
  for (int half = kWarpSize / 2; half > 0; half /= 2) {
    max = max_or_nan(max, __shfl_xor_sync(0xffffffffu, max, half));
  }
  return shift_to(function, max);
}

template <typename T>
__device__ __forceinline__ RowScale row_scale(ScoreFunction function, const T* logits, int64_t experts) {
  RowScale row = row_shift(function, logits, experts);
  double sum = 0.0;
  for (int64_t e = threadIdx.x % kWarpSize; e < experts; e += kWarpSize) {
    sum = sum + score_term(function, to_float(logits[e]), row);
  }
  sum = fold_lanes(sum);
  if (row.shift != -INFINITY) row.inverse = inverse_of(function, sum);
  return row;
}

}  // namespace transformer_plugin::routing
