// What a buffer holds where sums go: beta times that is added to them before the one rounding. Threads read it; each element is
// written by the tile whose sums it is added to, after that, and by no other.
#pragma once

#include "gemm/sm90/pipeline.cuh"

namespace transformer_plugin::gemm::sm90 {

// Of a group; nothing is read of the buffer where it is 0, as it is without one.
template <typename Args>
__device__ __forceinline__ float beta_of(const Args& args, int group) {
  return args.beta ? args.beta[group] : 0.0f;
}

// The elements at `at` in the place of a warpgroup's sums, of which `rows` by `columns` are there: of 64 by 256, or of 256 by 64
// where tiles are turned (hopper_decoded.cuh).
template <typename T>
struct Held {
  T* at;
  int64_t row_stride;
  int rows, columns;

  // Sends for them into the second level cache, while products run: of each row the lines of 128 bytes that have a bit in
  // `lines`. All threads of a warp come back together.
  template <int most_rows = kBoxLines, int most_columns = kTileColumns>
  __device__ __forceinline__ void send(uint32_t lines) const {
    constexpr int kColumns = kStep<T>;
#pragma unroll
    for (int i = 0; i < most_rows * (most_columns / kColumns); i += kWarpgroup) {
      const int own = i + threadIdx.x % kWarpgroup, row = own % most_rows, line = own / most_rows;
      if (row < rows && lines >> line & 1 && line * kColumns < columns) {
        prefetch_line(at + row * row_stride + line * kColumns);
      }
    }
    __syncwarp();
  }

  // Adds beta times each element to its sum. A thread's sums are pairs, as `multiply` tells (hopper_instructions.cuh); `columns`
  // are even. In the place of elements that are not there it takes others that are, for sums that nobody stores: loads without
  // conditions, of which many are under way at a time.
  __device__ __forceinline__ void add(float (&sums)[kSums], float beta) const {
    if (rows <= 0) return;
    using Pair = std::conditional_t<sizeof(T) == 4, float2, uint32_t>;
    const int lane = threadIdx.x % kWarpSize, column = lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = threadIdx.x % kWarpgroup / kWarpSize * 16 + half * 8 + lane / 4;
      const T* line = at + min(row, rows - 1) * row_stride;
#pragma unroll
      for (int first = 0; first < kTileColumns / 8; first += kAtOnce) {
        if (first * 8 >= columns) break;
        Pair pairs[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int own = min(column + (first + i) * 8, columns - 2);
          pairs[i] = __ldcs(reinterpret_cast<const Pair*>(line + own));
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          float* own = &sums[(first + i) * 4 + half * 2];
          const float2 old = floats_of(pairs[i]);
          own[0] = fmaf(beta, old.x, own[0]);
          own[1] = fmaf(beta, old.y, own[1]);
        }
      }
    }
  }

  // The same of turned sums, which lie as scale_and_add_bias_turned tells.
  __device__ __forceinline__ void add_turned(float (&sums)[kSums], float beta) const {
    if (columns <= 0) return;
    const int lane = threadIdx.x % kWarpSize;
    const int row = lane % 4 * 2, column = threadIdx.x % kWarpgroup / kWarpSize * 16 + lane / 4;
    const T* low = at + min(column, columns - 1);
    const T* high = at + min(column + 8, columns - 1);
#pragma unroll
    for (int first = 0; first < kSums; first += kAtOnce) {
      if (first / 4 * 8 >= rows) break;
      T old[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int own = min(row + (first + i) / 4 * 8 + i % 2, rows - 1);
        old[i] = __ldcs((i / 2 % 2 == 0 ? low : high) + own * row_stride);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sums[first + i] = fmaf(beta, to_float(old[i]), sums[first + i]);
    }
  }

 private:
  static constexpr int kAtOnce = 16;  // loads of a thread; more hold registers that the sums want

  static __device__ __forceinline__ float2 floats_of(float2 pair) { return pair; }
  static __device__ __forceinline__ float2 floats_of(uint32_t pair) { return as_floats<T>(pair); }
};

}  // namespace transformer_plugin::gemm::sm90
