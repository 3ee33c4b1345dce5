// A block's sums of 16-bit operands on the tensor cores: 8 warps, each 64 x 32 of the output, in FP32.
#pragma once

#include <mma.h>

#include "gemm/generic/grouped_gemm.cuh"

namespace transformer_plugin::gemm {

namespace wmma = nvcuda::wmma;

template <typename T, GemmDirection mode>
struct MultiplyTensorCore {
  static constexpr int kBlockK = 32;
  static constexpr int kFragment = 16;
  static constexpr int kWarpRows = 64, kWarpColumns = 32;
  static constexpr int kFragmentsM = kWarpRows / kFragment, kFragmentsN = kWarpColumns / kFragment;
  static constexpr bool kARow = mode != GemmDirection::kWgrad;
  static constexpr bool kBRow = mode == GemmDirection::kFprop;
  // Eight elements of padding move consecutive rows to other banks and keep 16-byte alignment.
  static constexpr int kAStride = (kARow ? kBlockK : kBlockM) + 8;
  static constexpr int kBStride = (kBRow ? kBlockK : kBlockN) + 8;
  static constexpr int kStageStride = kFragment + 4;

  struct Shared {
    alignas(128) T a[(kARow ? kBlockM : kBlockK) * kAStride];
    alignas(128) T b[(kBRow ? kBlockN : kBlockK) * kBStride];
    alignas(128) float stage[kThreads / kWarpSize][kFragment * kStageStride];
  };
  using AFragment = wmma::fragment<wmma::matrix_a, kFragment, kFragment, kFragment, T,
                                   std::conditional_t<kARow, wmma::row_major, wmma::col_major>>;
  using BFragment = wmma::fragment<wmma::matrix_b, kFragment, kFragment, kFragment, T,
                                   std::conditional_t<kBRow, wmma::col_major, wmma::row_major>>;
  using Sum = wmma::fragment<wmma::accumulator, kFragment, kFragment, kFragment, float>;

  Sum sums[kFragmentsM][kFragmentsN];

  __device__ MultiplyTensorCore() {
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) wmma::fill_fragment(sums[i][j], 0.0f);
    }
  }

  __device__ static int warp_row() { return threadIdx.x / kWarpSize / (kBlockN / kWarpColumns) * kWarpRows; }
  __device__ static int warp_column() {
    return threadIdx.x / kWarpSize % (kBlockN / kWarpColumns) * kWarpColumns;
  }

  template <typename PanelT>
  __device__ static void keep_panel(const PanelT& panel, T* target, int stride) {
#pragma unroll
    for (int v = 0; v < PanelT::kVectors; ++v) {
      *reinterpret_cast<uint4*>(target + PanelT::outer(v) * stride + PanelT::inner(v)) =
          panel.vectors[v].bits;
    }
  }

  template <typename APanel, typename BPanel>
  __device__ void keep(const APanel& a, const BPanel& b, Shared& shared) {
    keep_panel(a, shared.a, kAStride);
    keep_panel(b, shared.b, kBStride);
  }

  __device__ void add(const Shared& shared) {
#pragma unroll
    for (int k = 0; k < kBlockK; k += kFragment) {
      AFragment a[kFragmentsM];
      BFragment b[kFragmentsN];
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
        const int row = warp_row() + i * kFragment;
        wmma::load_matrix_sync(a[i], shared.a + (kARow ? row * kAStride + k : k * kAStride + row), kAStride);
      }
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
        const int column = warp_column() + j * kFragment;
        wmma::load_matrix_sync(b[j], shared.b + (kBRow ? column * kBStride + k : k * kBStride + column),
                               kBStride);
      }
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
        for (int j = 0; j < kFragmentsN; ++j) wmma::mma_sync(sums[i][j], a[i], b[j], sums[i][j]);
      }
    }
  }

  // Which element of a fragment a thread holds is not specified: each warp spreads them out in its stage.
  __device__ void finish(const GroupedGemmArgs& args, const TileWork& work, Shared& shared) {
    const int lane = threadIdx.x % kWarpSize;
    float* stage = shared.stage[threadIdx.x / kWarpSize];
    constexpr int kPerLane = kFragment * kFragment / kWarpSize;
    const int stage_row = lane * kPerLane / kFragment, stage_column = lane * kPerLane % kFragment;
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
        wmma::store_matrix_sync(stage, sums[i][j], kStageStride, wmma::mem_row_major);
        __syncwarp();
        const int64_t row = work.m_begin + warp_row() + i * kFragment + stage_row;
        const int64_t column = work.n_begin + warp_column() + j * kFragment + stage_column;
        for (int e = 0; e < kPerLane; ++e) {
          gemm::finish<mode>(args, work, row, column + e, stage[stage_row * kStageStride + stage_column + e]);
        }
        __syncwarp();
      }
    }
  }
};

}  // namespace transformer_plugin::gemm
