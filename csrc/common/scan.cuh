// Prefix sums over a block of threads.
#pragma once

#include "common/launch.cuh"

namespace transformer_plugin {

template <typename T, int kThreads>
struct BlockScan {
  static constexpr int kWarps = kThreads / kWarpSize;
  static_assert(kThreads % kWarpSize == 0, "whole warps");
  T of_warp[kWarps];

  // The inclusive prefix sum of `value`; `total` becomes the sum over all threads. Called by all threads.
  __device__ __forceinline__ T inclusive(T value, T& total) {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const T left = __shfl_up_sync(0xffffffffu, value, distance);
      if (lane >= distance) value += left;
    }
    __syncthreads();  // the previous call's sums have been read
    if (lane == kWarpSize - 1) of_warp[warp] = value;
    __syncthreads();
    total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) value += total;
      total += of_warp[w];
    }
    return value;
  }
};

}  // namespace transformer_plugin
