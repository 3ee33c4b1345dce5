// The vectors of a row's input that hold the gates and the linear parts of adjacent columns.
#pragma once

#include "activation/activation.h"
#include "common/vectors.cuh"

namespace transformer_plugin::activation {

// Two vectors of kVectorSize values: the gates and the linear parts. `alternating`: neighbours in memory, whose values are one of each in
// turn.
template <typename T, bool alternating>
struct PartVectors {
  static constexpr int kCount = kVectorSize<T>;

  // How far the second vector is behind the first.
  template <typename Columns>
  static __device__ __forceinline__ int64_t second(const Columns& columns) {
    if constexpr (alternating) return kCount;
    return columns.linear_offset();
  }
  // Of `count` columns, the values in the first vector and from there on, and in the second.
  static __device__ __forceinline__ int64_t in_first(int64_t count) {
    return alternating ? 2 * count : count;
  }
  static __device__ __forceinline__ int64_t in_second(int64_t count) {
    return alternating ? 2 * count - kCount : count;
  }

  // From the order in memory to a vector of gates and one of linear parts.
  static __device__ __forceinline__ void split(Floats<T>& first, Floats<T>& second) {
    if constexpr (alternating) {
      const Floats<T> low = first, high = second;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const Floats<T>& from = i < kCount / 2 ? low : high;
        first.at[i] = from.at[2 * i % kCount];
        second.at[i] = from.at[2 * i % kCount + 1];
      }
    }
  }
  // And back.
  static __device__ __forceinline__ void join(Floats<T>& first, Floats<T>& second) {
    if constexpr (alternating) {
      const Floats<T> gates = first, linears = second;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        Floats<T>& to = i < kCount / 2 ? first : second;
        to.at[2 * i % kCount] = gates.at[i];
        to.at[2 * i % kCount + 1] = linears.at[i];
      }
    }
  }
};

}  // namespace transformer_plugin::activation
