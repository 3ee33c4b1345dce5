// Row sums over lanes, as a tree in the order of the gradient of an activation's probabilities
// (activation/activation.h).
#pragma once

#include "common/launch.cuh"

namespace transformer_plugin::activation {

// Adds each row over kLanes neighbouring lanes of a warp, neighbours first. Each exchange halves the rows
// that a lane keeps; in the end lane l holds row row_of(l) in the first place.
template <int kRows, int kLanes>
struct RowSums {
  float at[kRows];

  __device__ __forceinline__ void fold(int lane) {
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const int half = kRows / 2 / distance;
      if (half == 0) at[0] = at[0] + __shfl_xor_sync(0xffffffffu, at[0], distance);
      const bool upper = lane & distance;
#pragma unroll
      for (int r = 0; r < half; ++r) {
        const float kept = upper ? at[half + r] : at[r];
        const float sent = upper ? at[r] : at[half + r];
        at[r] = kept + __shfl_xor_sync(0xffffffffu, sent, distance);
      }
    }
  }

  static __device__ __forceinline__ int row_of(int lane) {
    int row = 0;
#pragma unroll
    for (int distance = 1; distance < kRows; distance *= 2) {
      if (lane & distance) row += kRows / 2 / distance;
    }
    return row;
  }
};

}  // namespace transformer_plugin::activation
