// BF16 and FP16 operands of grouped_gemm.cuh: tensor cores through nvcuda::wmma. 8 warps, each 64 x 32 of the
// tile, FP32 accumulators.
#pragma once

#include <mma.h>

#include "gemm/generic/grouped_gemm.cuh"

namespace transformer_plugin::gemm {

namespace wmma = nvcuda::wmma;

template <typename T, GemmDirection mode>
struct TensorCoreMma {
  static constexpr int kBlockK = 32;
  static constexpr int kFragment = 16;
  static constexpr int kWarpRows = 64, kWarpColumns = 32;
  static constexpr int kFragmentsM = kWarpRows / kFragment, kFragmentsN = kWarpColumns / kFragment;
  static constexpr bool kAKMajor = mode != GemmDirection::kWgrad;
  static constexpr bool kBKMajor = mode == GemmDirection::kFprop;
  // Eight elements of padding place consecutive rows in different banks and keep 16-byte alignment.
  static constexpr int kAStride = (kAKMajor ? kBlockK : kBlockM) + 8;
  static constexpr int kBStride = (kBKMajor ? kBlockK : kBlockN) + 8;
  static constexpr int kStageStride = kFragment + 4;

  struct Shared {
    alignas(128) T a[(kAKMajor ? kBlockM : kBlockK) * kAStride];
    alignas(128) T b[(kBKMajor ? kBlockN : kBlockK) * kBStride];
    alignas(128) float stage[kThreads / kWarpSize][kFragment * kStageStride];
  };
  using AFragment = wmma::fragment<wmma::matrix_a, kFragment, kFragment, kFragment, T,
                                   std::conditional_t<kAKMajor, wmma::row_major, wmma::col_major>>;
  using BFragment = wmma::fragment<wmma::matrix_b, kFragment, kFragment, kFragment, T,
                                   std::conditional_t<kBKMajor, wmma::col_major, wmma::row_major>>;
  using Accumulator = wmma::fragment<wmma::accumulator, kFragment, kFragment, kFragment, float>;

  Accumulator acc[kFragmentsM][kFragmentsN];

  __device__ TensorCoreMma() {
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) wmma::fill_fragment(acc[i][j], 0.0f);
    }
  }

  __device__ static int warp_row() { return threadIdx.x / kWarpSize / (kBlockN / kWarpColumns) * kWarpRows; }
  __device__ static int warp_column() {
    return threadIdx.x / kWarpSize % (kBlockN / kWarpColumns) * kWarpColumns;
  }

  template <typename PanelT>
  __device__ static void store_panel(const PanelT& panel, T* target, int stride) {
#pragma unroll
    for (int v = 0; v < PanelT::kVectors; ++v) {
      *reinterpret_cast<uint4*>(target + PanelT::outer(v) * stride + PanelT::inner(v)) =
          panel.vectors[v].bits;
    }
  }

  template <typename APanel, typename BPanel>
  __device__ void store_panels(const APanel& a, const BPanel& b, Shared& shared) {
    store_panel(a, shared.a, kAStride);
    store_panel(b, shared.b, kBStride);
  }

  __device__ void mma(const Shared& shared) {
#pragma unroll
    for (int k = 0; k < kBlockK; k += kFragment) {
      AFragment a[kFragmentsM];
      BFragment b[kFragmentsN];
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
        const int row = warp_row() + i * kFragment;
        wmma::load_matrix_sync(a[i], shared.a + (kAKMajor ? row * kAStride + k : k * kAStride + row),
                               kAStride);
      }
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
        const int column = warp_column() + j * kFragment;
        wmma::load_matrix_sync(b[j], shared.b + (kBKMajor ? column * kBStride + k : k * kBStride + column),
                               kBStride);
      }
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
        for (int j = 0; j < kFragmentsN; ++j) wmma::mma_sync(acc[i][j], a[i], b[j], acc[i][j]);
      }
    }
  }

  // The layout of wmma fragments is not specified, so each warp stores them to its buffer in shared memory
  // first.
  __device__ void epilogue(const GroupedGemmArgs& args, const OutputTile& tile, Shared& shared) {
    const int lane = threadIdx.x % kWarpSize;
    float* stage = shared.stage[threadIdx.x / kWarpSize];
    constexpr int kPerLane = kFragment * kFragment / kWarpSize;
    const int stage_row = lane * kPerLane / kFragment, stage_column = lane * kPerLane % kFragment;
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
      for (int j = 0; j < kFragmentsN; ++j) {
        wmma::store_matrix_sync(stage, acc[i][j], kStageStride, wmma::mem_row_major);
        __syncwarp();
        const int64_t row = tile.m_begin + warp_row() + i * kFragment + stage_row;
        const int64_t column = tile.n_begin + warp_column() + j * kFragment + stage_column;
        for (int e = 0; e < kPerLane; ++e) {
          store_element<mode>(args, tile, row, column + e,
                              stage[stage_row * kStageStride + stage_column + e]);
        }
        __syncwarp();
      }
    }
  }
};

}  // namespace transformer_plugin::gemm
