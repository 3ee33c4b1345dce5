// Units of 8 neighbouring columns, which a thread reads and writes as floats, for any width and alignment.
#pragma once

#include "common/vectors.cuh"

namespace transformer_plugin {

inline constexpr int kUnit = 8;

// Reads columns of a matrix or a vector.
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

}  // namespace transformer_plugin
