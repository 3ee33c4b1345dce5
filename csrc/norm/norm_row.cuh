// A row distributed over a block of 128 threads. Thread t has the units of 8 columns t, t + 128, ... of the
// row, so that column c % 8 of its units is one of the 1024 partial sums of norm.h; threads, warps and the
// block each add one part of the tree.
#pragma once

#include "common/launch.cuh"
#include "common/vectors.cuh"
#include "norm/norm.h"

namespace transformer_plugin::norm {

inline constexpr int kThreads = 128;
inline constexpr int kWarps = kThreads / kWarpSize;
inline constexpr int kUnit = 8;
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

// Reads columns of a matrix or a vector, 8 at a time as floats, for any width and alignment.
template <typename T>
struct Columns {
  const T* begin;  // null: nothing to read
  bool vectors;    // whether all units are full and aligned

  __device__ __forceinline__ Columns(const void* matrix, int64_t row, int64_t cols)
      : begin(matrix ? static_cast<const T*>(matrix) + row * cols : nullptr),
        vectors(cols % kUnit == 0 && reinterpret_cast<uintptr_t>(matrix) % 16 == 0) {}

  // From column `first`; `count` columns exist, the others are 0.
  __device__ __forceinline__ void read(int64_t first, int count, float (&values)[kUnit]) const {
    if (vectors && count >= kUnit) {
      constexpr int kSize = kVectorSize<T>;
#pragma unroll
      for (int v = 0; v < kUnit / kSize; ++v) {
        const Floats<T> floats(*reinterpret_cast<const uint4*>(begin + first + v * kSize));
#pragma unroll
        for (int i = 0; i < kSize; ++i) values[v * kSize + i] = floats.at[i];
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kUnit; ++i) values[i] = i < count ? to_float(begin[first + i]) : 0.0f;
  }
};

// Rounds 8 values to T and stores those that exist.
template <typename T>
__device__ __forceinline__ void store_unit(T* target, int count, bool vectors, const float (&values)[kUnit]) {
  if (vectors && count >= kUnit) {
    constexpr int kSize = kVectorSize<T>;
#pragma unroll
    for (int v = 0; v < kUnit / kSize; ++v) {
      Floats<T> floats;
#pragma unroll
      for (int i = 0; i < kSize; ++i) floats.at[i] = values[v * kSize + i];
      *reinterpret_cast<uint4*>(target + v * kSize) = floats.rounded();
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    if (i < count) target[i] = from_float<T>(values[i]);
  }
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
