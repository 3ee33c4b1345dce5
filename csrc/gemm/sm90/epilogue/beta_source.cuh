// The factors of the epilogue, and its source operand: out = acc * output_scale + beta * out. Threads read
// the old values of the output directly from global memory. Each element is read and then written by the same
// tile, and by no other.
#pragma once

#include "common/ptx/memory.cuh"
#include "gemm/sm90/epilogue/store_accumulators.cuh"

namespace transformer_plugin::gemm::sm90 {

// beta of a group, 0 without beta. The output is not read where it is 0.
template <typename Params>
__device__ __forceinline__ float group_beta(const Params& args, int group) {
  return args.beta ? args.beta[group] : 0.0f;
}

// The factor of a group's accumulators: alpha[g], times a_scale[g] * b_scale[g] if the operands have one
// scale for each group.
template <bool group_scales>
__device__ __forceinline__ float output_scale(const float* alphas, const float* a_scale, const float* b_scale,
                                              int group) {
  const float alpha = alphas ? alphas[group] : 1.0f;
  if constexpr (group_scales) return a_scale[group] * b_scale[group] * alpha;
  return alpha;
}

// The part of `out` that a warpgroup's tile covers: 64 x 256, or 256 x 64 in kernels that swap A and B. It is
// read before it is overwritten; with `accumulate` it is the destination too. `rows` and `columns` count the
// elements that exist, from `data` on; they may be zero or negative.
template <typename T>
struct OutputView {
  T* data;
  int64_t row_stride;
  int rows, columns;

  // Prefetches the tile into L2 while WGMMAs run. Rows consist of 128-byte segments. Only segments whose bit
  // in `segments` is set are prefetched. All lanes of a warp return together.
  template <int max_rows = kBoxRows, int max_columns = kTileColumns>
  __device__ __forceinline__ void prefetch(uint32_t segments) const {
    constexpr int kColumns = kTileK<T>;
#pragma unroll
    for (int i = 0; i < max_rows * (max_columns / kColumns); i += kWarpgroupSize) {
      const int index = i + threadIdx.x % kWarpgroupSize, row = index % max_rows, segment = index / max_rows;
      if (row < rows && segments >> segment & 1 && segment * kColumns < columns) {
        prefetch_l2(data + row * row_stride + segment * kColumns);
      }
    }
    __syncwarp();
  }

  // acc += beta * out, for the accumulator layout of wgmma() (common/ptx/wgmma.cuh). `columns` is even.
  // Addresses past the end are clamped to the last row or column instead of skipped, so that the loads need no
  // branch and overlap; those accumulators are never stored.
  __device__ __forceinline__ void add_scaled(float (&acc)[kAccumulators], float beta) const {
    if (rows <= 0) return;
    using Pair = std::conditional_t<sizeof(T) == 4, float2, uint32_t>;
    const int lane = threadIdx.x % kWarpSize, thread_column = lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = threadIdx.x % kWarpgroupSize / kWarpSize * 16 + half * 8 + lane / 4;
      const T* source_row = data + min(row, rows - 1) * row_stride;
#pragma unroll
      for (int j = 0; j < kTileColumns / 8; j += kLoadsInFlight) {  // 8 columns each
        if (j * 8 >= columns) break;
        Pair pairs[kLoadsInFlight];
#pragma unroll
        for (int i = 0; i < kLoadsInFlight; ++i) {
          const int column = min(thread_column + (j + i) * 8, columns - 2);
          pairs[i] = __ldcs(reinterpret_cast<const Pair*>(source_row + column));
        }
#pragma unroll
        for (int i = 0; i < kLoadsInFlight; ++i) {
          float* sums = &acc[(j + i) * 4 + half * 2];
          const float2 old = to_float2(pairs[i]);
          sums[0] = fmaf(beta, old.x, sums[0]);
          sums[1] = fmaf(beta, old.y, sums[1]);
        }
      }
    }
  }

  // The same for accumulators of the transposed output (scale_and_add_bias_transposed describes their
  // layout).
  __device__ __forceinline__ void add_scaled_transposed(float (&acc)[kAccumulators], float beta) const {
    if (columns <= 0) return;
    const int lane = threadIdx.x % kWarpSize;
    const int quad_row = lane % 4 * 2, column = threadIdx.x % kWarpgroupSize / kWarpSize * 16 + lane / 4;
    const T* column0 = data + min(column, columns - 1);
    const T* column1 = data + min(column + 8, columns - 1);
#pragma unroll
    for (int begin = 0; begin < kAccumulators; begin += kLoadsInFlight) {
      if (begin / 4 * 8 >= rows) break;
      T old[kLoadsInFlight];
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) {
        const int row = min(quad_row + (begin + i) / 4 * 8 + i % 2, rows - 1);
        old[i] = __ldcs((i / 2 % 2 == 0 ? column0 : column1) + row * row_stride);
      }
#pragma unroll
      for (int i = 0; i < kLoadsInFlight; ++i) {
        acc[begin + i] = fmaf(beta, to_float(old[i]), acc[begin + i]);
      }
    }
  }

 private:
  static constexpr int kLoadsInFlight = 16;  // of a thread; limited by the registers that accumulators leave

  static __device__ __forceinline__ float2 to_float2(float2 pair) { return pair; }
  static __device__ __forceinline__ float2 to_float2(uint32_t pair) { return unpack2<T>(pair); }
};

}  // namespace transformer_plugin::gemm::sm90
