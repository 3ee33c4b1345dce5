// A row distributed over a block of 128 threads. Thread t has the units of 8 columns t, t + 128, ... of the
// row, so that column c % 8 of its units is one of the 1024 partial sums of norm.h; threads, warps and the
// block each add one part of the tree.
#pragma once

#include "common/launch.cuh"
#include "common/units.cuh"
#include "norm/norm.h"

namespace transformer_plugin::norm {

inline constexpr int kThreads = 128;
inline constexpr int kWarps = kThreads / kWarpSize;
static_assert(kThreads * kUnit == kPartialSums, "a thread's columns are the same partial sums in every unit");
static_assert(kWarps == 4, "the last sums are of four warps");

// The sums of the warps. Two consecutive sums use different buffers; a third sum starts only after all
// threads have passed the barrier of the second, and so have read the first.
struct SumBuffers {
  alignas(16) float of_warps[2][kWarps];
};

// The sum of kPartialSums partial sums, of which a thread holds 8 neighbours; returned in every thread.
__device__ __forceinline__ float sum_of_partials(const float (&p)[kUnit], SumBuffers& buffers, int& parity) {
  float sum = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    sum = sum + __shfl_xor_sync(0xffffffffu, sum, distance);
  }
  float* of_warps = buffers.of_warps[parity];
  parity ^= 1;
  if (threadIdx.x % kWarpSize == 0) of_warps[threadIdx.x / kWarpSize] = sum;
  __syncthreads();
  const float4 sums = *reinterpret_cast<const float4*>(of_warps);
  return (sums.x + sums.y) + (sums.z + sums.w);
}

// Calls `body(first column, number of columns)` for the units of this thread in a row of `cols` columns. All
// threads make the same number of calls; for units past the row the number is 0.
template <typename Body>
__device__ __forceinline__ void for_each_unit(int64_t cols, Body&& body) {
  for (int64_t start = 0; start < cols; start += kPartialSums) {
    const int64_t first = start + threadIdx.x * kUnit;
    const int64_t left = cols - first;
    body(first, static_cast<int>(left < 0 ? 0 : (left < kUnit ? left : kUnit)));
  }
}

}  // namespace transformer_plugin::norm
