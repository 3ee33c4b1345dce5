// Column sums of a 128x128 tile that is distributed over 256 threads: warp w has rows 16w .. 16w + 15, lane l
// has columns 4l .. 4l + 3.
#pragma once

#include "common/column_sums.h"
#include "common/launch.cuh"

namespace transformer_plugin {

inline constexpr int kSumWarps = 8;
inline constexpr int kSumLaneColumns = kSumRows / kWarpSize;

// The sum of terms first .. first + kCount - 1, a power of two, as a tree of neighbours.
template <int kCount, typename Term>
__device__ __forceinline__ float sum_as_tree(Term&& term, int first = 0) {
  if constexpr (kCount == 1) {
    return term(first);
  } else {
    const float low = sum_as_tree<kCount / 2>(term, first);
    const float high = sum_as_tree<kCount / 2>(term, first + kCount / 2);
    return low + high;
  }
}

struct TileSums {
  alignas(16) float of_warps[kSumWarps][kSumRows];
};

// `term(i, c)` returns the i-th of kTerms sums of neighbouring rows for this thread's column c, 0 <= c < 4.
// Called by all threads of the block; `target` receives the sums of the first `columns` columns.
template <int kTerms, typename Term>
__device__ __forceinline__ void sum_tile(Term&& term, int columns, TileSums& shared, float* target) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  float of_rows[kSumLaneColumns];
#pragma unroll
  for (int c = 0; c < kSumLaneColumns; ++c) {
    of_rows[c] = sum_as_tree<kTerms>([&](int i) { return term(i, c); });
  }
  *reinterpret_cast<float4*>(&shared.of_warps[warp][lane * kSumLaneColumns]) =
      make_float4(of_rows[0], of_rows[1], of_rows[2], of_rows[3]);
  __syncthreads();
  const int column = threadIdx.x;
  if (column < columns) {
    target[column] = sum_as_tree<kSumWarps>([&](int w) { return shared.of_warps[w][column]; });
  }
}

}  // namespace transformer_plugin
