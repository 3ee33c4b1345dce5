// A thread's part of a tile of any matrix, in batches of rows whose loads are under way together: what sources that compute
// their values are made of.
#pragma once

#include "quantize/cuda/tile/common.cuh"

namespace transformer_plugin::quantize {

// Rows of a thread whose loads are under way together: what registers hold.
template <typename T>
inline constexpr int kRowsUnderWay = sizeof(T) == 2 ? 8 : 4;

template <typename T>
struct Floats4 {
  float at[kColsPerThread];
  __device__ __forceinline__ explicit Floats4(Vector4<T> vector) {
    T values[kColsPerThread];
    memcpy(values, &vector, sizeof(vector));
#pragma unroll
    for (int c = 0; c < kColsPerThread; ++c) at[c] = to_float(values[c]);
  }
};

// A thread's part of a tile in a matrix of `width` columns.
template <typename T>
struct Part {
  const T* begin;
  int64_t width;
  int rows;      // of kRowsPerThread; not positive when there are none
  int count;     // of kColsPerThread; not positive when there are none
  bool vectors;  // whether every row is read in one vector: the same in all threads

  __device__ __forceinline__ Part(const void* matrix, int64_t columns, const Tile& tile, int warp, int lane)
      : begin(static_cast<const T*>(matrix) + (tile.row + warp * kRowsPerThread) * columns + tile.col +
              lane * kColsPerThread),
        width(columns),
        rows(tile.tail ? 0 : tile.rows - warp * kRowsPerThread),
        count(tile.cols - lane * kColsPerThread),
        vectors(tile.cols == kTile && columns % kColsPerThread == 0 &&
                reinterpret_cast<uintptr_t>(matrix) % sizeof(Vector4<T>) == 0) {}

  // Rows `start` and after, `offset` columns to the right; zero where there are none.
  template <int kBatch>
  __device__ __forceinline__ void read(int start, int64_t offset, Vector4<T> (&batch)[kBatch]) const {
    const T* source = begin + start * width + offset;
    if (vectors && offset % kColsPerThread == 0) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        batch[i] = {};
        if (start + i < rows) batch[i] = *reinterpret_cast<const Vector4<T>*>(source + i * width);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      T values[kColsPerThread];
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) {
        values[c] = from_float<T>(0.0f);
        if (start + i < rows && c < count) values[c] = source[i * width + c];
      }
      memcpy(&batch[i], values, sizeof(values));
    }
  }
};

// Four values to a row, in one store where `vectors` says so.
template <typename T>
__device__ __forceinline__ void store4(T* target, Vector4<T> vector, int count, bool vectors) {
  if (vectors) {
    *reinterpret_cast<Vector4<T>*>(target) = vector;
    return;
  }
  T values[kColsPerThread];
  memcpy(values, &vector, sizeof(vector));
#pragma unroll
  for (int c = 0; c < kColsPerThread; ++c) {
    if (c < count) target[c] = values[c];
  }
}

template <typename T>
__device__ __forceinline__ Vector4<T> rounded4(const float (&floats)[kColsPerThread]) {
  const Two<T> twos[2] = {two_from_floats<T>(floats[0], floats[1]), two_from_floats<T>(floats[2], floats[3])};
  Vector4<T> vector;
  memcpy(&vector, twos, sizeof(vector));
  return vector;
}

// The probability of row `r` of the warp's 16, given what the lane of that number read.
__device__ __forceinline__ float read_probs(const float* probs, const Tile& tile, int warp, int lane) {
  const int row = warp * kRowsPerThread + lane;
  if (!probs) return 1.0f;
  return lane < kRowsPerThread && row < tile.rows && !tile.tail ? probs[tile.row + row] : 0.0f;
}

}  // namespace transformer_plugin::quantize
