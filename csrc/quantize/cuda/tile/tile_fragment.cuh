// Loads of a thread's fragment of a tile in batches of rows, for sources that compute their values.
#pragma once

#include "quantize/cuda/tile/common.cuh"

namespace transformer_plugin::quantize {

// Rows whose loads are issued together, limited by registers.
template <typename T>
inline constexpr int kRowsInFlight = sizeof(T) == 2 ? 8 : 4;

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

// Reads a thread's fragment of a tile from a matrix of `width` columns.
template <typename T>
struct FragmentReader {
  const T* begin;
  int64_t width;
  int rows;      // of kRowsPerThread; zero or less if there are none
  int count;     // of kColsPerThread; zero or less if there are none
  bool vectors;  // whether every row is read as one vector: the same in all threads

  __device__ __forceinline__ FragmentReader(const void* matrix, int64_t columns, const Tile& tile, int warp,
                                            int lane)
      : begin(static_cast<const T*>(matrix) + (tile.row + warp * kRowsPerThread) * columns + tile.col +
              lane * kColsPerThread),
        width(columns),
        rows(tile.tail ? 0 : tile.rows - warp * kRowsPerThread),
        count(tile.cols - lane * kColsPerThread),
        vectors(tile.cols == kTile && columns % kColsPerThread == 0 &&
                reinterpret_cast<uintptr_t>(matrix) % sizeof(Vector4<T>) == 0) {}

  // Rows from `start` on, `offset` columns to the right; zero outside of the matrix.
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

// Stores four values of a row, as one vector if `vectors`.
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
  const Packed2<T> twos[2] = {two_from_floats<T>(floats[0], floats[1]),
                              two_from_floats<T>(floats[2], floats[3])};
  Vector4<T> vector;
  memcpy(&vector, twos, sizeof(vector));
  return vector;
}

// One value per row: lane r reads that of row r of the warp. 1 if `probs` is null, 0 outside of the matrix.
__device__ __forceinline__ float load_row_scalar(const float* probs, const Tile& tile, int warp, int lane) {
  const int row = warp * kRowsPerThread + lane;
  if (!probs) return 1.0f;
  return lane < kRowsPerThread && row < tile.rows && !tile.tail ? probs[tile.row + row] : 0.0f;
}

}  // namespace transformer_plugin::quantize
