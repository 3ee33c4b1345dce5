// FP32 operands of grouped_gemm.cuh: FMA without TF32. 16 x 16 threads, each with 8 x 8 accumulators.
#pragma once

#include "gemm/generic/grouped_gemm.cuh"

namespace transformer_plugin::gemm {

template <typename T, GemmDirection mode>
struct FmaMma {
  static constexpr int kBlockK = 16;
  static constexpr int kSide = 16;  // threads along each side
  static constexpr int kHalf = 64;  // a thread has 4 rows and 4 columns of each half of the tile
  static constexpr int kStride = kBlockM + 4;
  static_assert(kBlockM == 2 * kHalf && kBlockN == 2 * kHalf && kSide * 4 == kHalf &&
                kSide * kSide == kThreads);

  struct Shared {  // both panels [k, rows or columns]
    alignas(16) float a[kBlockK * kStride];
    alignas(16) float b[kBlockK * kStride];
  };

  float acc[8][8] = {};

  template <bool k_major, typename PanelT>
  __device__ static void store_panel(const PanelT& panel, float* target) {
#pragma unroll
    for (int v = 0; v < PanelT::kVectors; ++v) {
      const int outer = PanelT::outer(v), inner = PanelT::inner(v);
      if constexpr (k_major) {
#pragma unroll
        for (int e = 0; e < PanelT::kVector; ++e)
          target[(inner + e) * kStride + outer] = panel.vectors[v].elements[e];
      } else {
        *reinterpret_cast<uint4*>(target + outer * kStride + inner) = panel.vectors[v].bits;
      }
    }
  }

  template <typename APanel, typename BPanel>
  __device__ void store_panels(const APanel& a, const BPanel& b, Shared& shared) {
    store_panel<mode != GemmDirection::kWgrad>(a, shared.a);
    store_panel<mode == GemmDirection::kFprop>(b, shared.b);
  }

  // Index in the tile of the i-th of the 8 rows or columns of a thread.
  __device__ static int place(int thread, int i) { return i / 4 * kHalf + thread * 4 + i % 4; }
  __device__ static int row(int i) { return place(threadIdx.x / kSide, i); }
  __device__ static int column(int j) { return place(threadIdx.x % kSide, j); }

  __device__ void mma(const Shared& shared) {
#pragma unroll
    for (int k = 0; k < kBlockK; ++k) {
      float a[8], b[8];
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        *reinterpret_cast<float4*>(a + i) = *reinterpret_cast<const float4*>(shared.a + k * kStride + row(i));
        *reinterpret_cast<float4*>(b + i) =
            *reinterpret_cast<const float4*>(shared.b + k * kStride + column(i));
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) acc[i][j] = fmaf(a[i], b[j], acc[i][j]);
      }
    }
  }

  __device__ void epilogue(const GroupedGemmArgs& args, const OutputTile& tile, Shared&) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        store_element<mode>(args, tile, tile.m_begin + row(i), tile.n_begin + column(j), acc[i][j]);
      }
    }
  }
};

}  // namespace transformer_plugin::gemm
