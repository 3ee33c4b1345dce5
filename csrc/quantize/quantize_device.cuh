// What the quantize kernels share: loading a tile into registers, maxima, and storing transposed codes.
#pragma once

#include "quantize/quantize.h"
#include "quantize/tile_device.cuh"

namespace transformer_plugin::quantize {

// A thread's part of a tile: zero outside the matrix and in the tail.
struct Values {
  float at[kRowsPerThread][kColsPerThread];
};

template <typename T>
struct alignas(4 * sizeof(T)) Vector4 {
  T at[4];
};

template <typename T>
__device__ __forceinline__ void load(const QuantizeArgs& args, const Tile& tile, int warp, int lane,
                                     Values& values) {
  const int64_t cols = args.layout.cols;
  const int c0 = lane * kColsPerThread;
  const int first_row = warp * kRowsPerThread;
  const T* input = static_cast<const T*>(args.input) +
                   (tile.member * args.layout.rows + tile.row + first_row) * cols + tile.col + c0;
  const int count = tile.tail ? 0 : tile.cols - c0;
  const bool whole = count >= kColsPerThread && cols % 4 == 0 &&
                     reinterpret_cast<uintptr_t>(args.input) % sizeof(Vector4<T>) == 0;
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const bool inside = first_row + r < tile.rows;
    if (whole && inside) {
      const Vector4<T> vector = *reinterpret_cast<const Vector4<T>*>(input + r * cols);
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) values.at[r][c] = to_float(vector.at[c]);
    } else {
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) {
        values.at[r][c] = inside && c < count ? to_float(input[r * cols + c]) : 0.0f;
      }
    }
  }
}

// fmaxf leaves NaN out.
__device__ __forceinline__ float max_abs(float largest, float value) { return fmaxf(largest, fabsf(value)); }

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

// Transposed codes: packed by the rows a thread holds, turned in shared memory, written a line at a time.
template <DType element>
__device__ __forceinline__ void write_columns(const QuantizeArgs& args, const Tile& tile,
                                              const Values& values, int warp, int lane, const float* scales,
                                              TransposedTile& turned) {
  const Layout& layout = args.layout;
#pragma unroll
  for (int c = 0; c < kColsPerThread; ++c) {
#pragma unroll
    for (int word = 0; word < kRowsPerThread / 4; ++word) {
      Codes4 codes;
#pragma unroll
      for (int i = 0; i < 4; ++i) codes.set(i, float_to_fp8<element>(values.at[word * 4 + i][c] * scales[c]));
      turned.at(lane * kColsPerThread + c, warp * (kRowsPerThread / 4) + word) = codes.word;
    }
  }
  __syncthreads();
  for (int column = warp; column < tile.cols; column += kWarps) {
    uint8_t* target =
        args.data_t + (tile.member * layout.cols + tile.col + column) * layout.rows + tile.row + lane * 4;
    Codes4 codes;
    codes.word = turned.at(column, lane);
    store_codes(target, codes, tile.rows - lane * 4, is_word_aligned(target));
  }
}

}  // namespace transformer_plugin::quantize
