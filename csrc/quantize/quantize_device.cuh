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
  const bool aligned = cols % 4 == 0 && reinterpret_cast<uintptr_t>(args.input) % sizeof(Vector4<T>) == 0;
  if (aligned && tile.rows == kTile && tile.cols == kTile && !tile.tail) {
    Vector4<T> vectors[kRowsPerThread];  // all under way before the first is used
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      vectors[r] = *reinterpret_cast<const Vector4<T>*>(input + r * cols);
    }
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) values.at[r][c] = to_float(vectors[r].at[c]);
    }
    return;
  }
  const int count = tile.tail ? 0 : tile.cols - c0;
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const bool inside = first_row + r < tile.rows;
#pragma unroll
    for (int c = 0; c < kColsPerThread; ++c) {
      values.at[r][c] = inside && c < count ? to_float(input[r * cols + c]) : 0.0f;
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

// Maxima of a warp's 16 rows, shared out: each exchange with another lane halves the rows that a lane is left with. Of
// `kLanes` neighbouring lanes, lane l ends up with the rows row_of(l) .. row_of(l) + kRowsPerThread / kLanes - 1 of the
// columns that these lanes hold. A scale is then computed once, not in every lane.
template <int kLanes>
struct RowMaxima {
  static constexpr int kRows = kRowsPerThread / kLanes;
  float at[kRowsPerThread];  // the first kRows count

  __device__ __forceinline__ void find(const Values& values, int lane) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      at[r] = 0.0f;
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) at[r] = max_abs(at[r], values.at[r][c]);
    }
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const bool upper = lane & distance;
      const int half = kRowsPerThread / 2 / distance;
#pragma unroll
      for (int r = 0; r < half; ++r) {
        const float kept = upper ? at[half + r] : at[r];
        const float given = upper ? at[r] : at[half + r];
        at[r] = fmaxf(kept, __shfl_xor_sync(0xffffffffu, given, distance));
      }
    }
  }

  static __device__ __forceinline__ int row_of(int lane) {
    int row = 0;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      if (lane & distance) row += kRowsPerThread / 2 / distance;
    }
    return row;
  }
  // The lane, of kLanes, that holds the row.
  static __host__ __device__ constexpr int lane_of(int row) {
    int lane = 0;
    for (int distance = 1; distance < kLanes; distance *= 2) {
      if (row & (kRowsPerThread / 2 / distance)) lane += distance;
    }
    return lane;
  }
};

// Four codes in a word; the conversion takes two values at once.
template <DType element>
__device__ __forceinline__ Codes4 encode4(float a, float b, float c, float d) {
  constexpr __nv_fp8_interpretation_t type = element == DType::kFloat8E4M3 ? __NV_E4M3 : __NV_E5M2;
  Codes4 codes;
  codes.word = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, type) |
               static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, type)) << 16;
  return codes;
}

// A row's codes of this thread.
template <DType element>
__device__ __forceinline__ void write_row(const QuantizeArgs& args, const Tile& tile, const Values& values,
                                          int r, int row, int c0, float scale) {
  const float* x = values.at[r];
  uint8_t* target =
      args.data + (tile.member * args.layout.rows + tile.row + row) * args.layout.cols + tile.col + c0;
  store_codes(target, encode4<element>(x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale),
              tile.cols - c0, args.layout.cols % 4 == 0);
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
      const float(*x)[kColsPerThread] = values.at + word * 4;
      turned.at(lane * kColsPerThread + c, warp * (kRowsPerThread / 4) + word) =
          encode4<element>(x[0][c] * scales[c], x[1][c] * scales[c], x[2][c] * scales[c], x[3][c] * scales[c])
              .word;
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
