// The source operand of the epilogue, out = acc + beta * out. Threads read the old values of the output
// directly from global memory. Each element is read and then written by the same tile, and by no other.
#pragma once

#include "gemm/sm90/epilogue/store_accumulators.cuh"

namespace transformer_plugin::gemm::sm90 {

// beta of a group, 0 without beta. The output is not read where it is 0.
template <typename Params>
__device__ __forceinline__ float group_beta(const Params& args, int group) {
  return args.beta ? args.beta[group] : 0.0f;
}

// The old output in the place of a consumer warpgroup's tile: 64 x 256, or 256 x 64 in kernels that swap A
// and B. `rows` and `columns` count the elements that exist, from `at` on.
template <typename T>
struct SourceTile {
  T* at;
  int64_t row_stride;
  int rows, columns;

  // Prefetches the tile into L2 while WGMMAs run. Only 128-byte segments of a row whose bit in `segments` is
  // set. All lanes of a warp return together.
  template <int max_rows = kBoxRows, int max_columns = kTileColumns>
  __device__ __forceinline__ void prefetch(uint32_t segments) const {
    constexpr int kColumns = kTileK<T>;
#pragma unroll
    for (int i = 0; i < max_rows * (max_columns / kColumns); i += kWarpgroupSize) {
      const int own = i + threadIdx.x % kWarpgroupSize, row = own % max_rows, segment = own / max_rows;
      if (row < rows && segments >> segment & 1 && segment * kColumns < columns) {
        prefetch_l2(at + row * row_stride + segment * kColumns);
      }
    }
    __syncwarp();
  }

  // acc += beta * source, for the accumulator layout of wgmma() (ptx/wgmma.cuh). `columns` is even. Rows and
  // columns past the end read the last ones instead, and their accumulators are not stored: loads without
  // conditions can overlap.
  __device__ __forceinline__ void add_scaled(float (&acc)[kAccumulators], float beta) const {
    if (rows <= 0) return;
    using Pair = std::conditional_t<sizeof(T) == 4, float2, uint32_t>;
    const int lane = threadIdx.x % kWarpSize, column = lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = threadIdx.x % kWarpgroupSize / kWarpSize * 16 + half * 8 + lane / 4;
      const T* source_row = at + min(row, rows - 1) * row_stride;
#pragma unroll
      for (int first = 0; first < kTileColumns / 8; first += kLoadsInFlight) {
        if (first * 8 >= columns) break;
        Pair pairs[kLoadsInFlight];
#pragma unroll
        for (int i = 0; i < kLoadsInFlight; ++i) {
          const int own = min(column + (first + i) * 8, columns - 2);
          pairs[i] = __ldcs(reinterpret_cast<const Pair*>(source_row + own));
        }
#pragma unroll
        for (int i = 0; i < kLoadsInFlight; ++i) {
          float* own = &acc[(first + i) * 4 + half * 2];
          const float2 old = to_float2(pairs[i]);
          own[0] = fmaf(beta, old.x, own[0]);
          own[1] = fmaf(beta, old.y, own[1]);
        }
      }
    }
  }

  // The same for accumulators of the transposed output (scale_and_add_bias_transposed describes their
  // layout).
  __device__ __forceinline__ void add_scaled_transposed(float (&acc)[kAccumulators], float beta) const {
    if (columns <= 0) return;
    const int lane = threadIdx.x % kWarpSize;
    const int row = lane % 4 * 2, column = threadIdx.x % kWarpgroupSize / kWarpSize * 16 + lane / 4;
    const T* low = at + min(column, columns - 1);
    const T* high = at + min(column + 8, columns - 1);
#pragma unroll
    for (int first = 0; first < kAccumulators; first += kLoadsInFlight) {
      if (first / 4 * 8 >= rows) break;
      T old[kLoadsInFlight];
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) {
        const int own = min(row + (first + i) / 4 * 8 + i % 2, rows - 1);
        old[i] = __ldcs((i / 2 % 2 == 0 ? low : high) + own * row_stride);
      }
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) {
        acc[first + i] = fmaf(beta, to_float(old[i]), acc[first + i]);
      }
    }
  }

 private:
  static constexpr int kLoadsInFlight = 16;  // of a thread; limited by the registers beside the accumulators

  static __device__ __forceinline__ float2 to_float2(float2 pair) { return pair; }
  static __device__ __forceinline__ float2 to_float2(uint32_t pair) { return unpack2<T>(pair); }
};

}  // namespace transformer_plugin::gemm::sm90
