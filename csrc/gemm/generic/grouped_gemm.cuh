// Grouped GEMM for any GPU and any shape, where the Hopper kernels (gemm/sm90) do not apply. For group g:
//
//   kFprop  out[i] = a[i] @ b[g]^T ..   a [T, k], b [G, n, k]    rows i of group g
//   kDgrad  out[i] = a[i] @ b[g] ..     a [T, k], b [G, k, n]
//   kWgrad  out[g] = a_g^T @ b_g ..     a [T, m], b [T, n]       sums over the rows of group g
//
// each times alpha[g], plus bias_scale[i] * bias[g] (not kWgrad), plus beta[g] * out or out; FP32, rounded
// once. Row-major operands.
//
// Grid: one block of 256 threads for each tile of 128 x 128 of the output. With ragged rows the grid covers
// the largest number of tiles that any group sizes can have, and blocks find their tile from the offsets on
// the device, so a CUDA graph can be replayed with other sizes. Shared memory: a panel of each operand, of
// kBlockK of K (mma_tensor_core.cuh, mma_fma.cuh).
//
// Each step loads the next panels from global memory to registers while the current panels are multiplied
// from shared memory. Elements out of bounds are zeros and are not read.
#pragma once

#include <cuda_runtime.h>

#include "common/device_types.cuh"
#include "common/launch.cuh"
#include "common/ragged.h"
#include "gemm/args/kernel_args.h"

namespace transformer_plugin::gemm {

inline constexpr int kBlockM = 128;
inline constexpr int kBlockN = 128;
inline constexpr int kThreads = 256;
inline constexpr int kRasterColumns = 8;  // tiles of a row that run together, so that they read `a` from L2

// A tile of the output, and the range of K that it sums over.
struct OutputTile {
  int64_t group;
  int64_t m_begin,
      m_end;  // first row of the tile and end of the group's rows; kWgrad: rows of the group's matrix
  int64_t n_begin;
  int64_t k_begin, k_end;
};

template <GemmDirection mode>
__device__ __forceinline__ OutputTile find_tile(const GroupedGemmArgs& args) {
  const int64_t tiles_n = (args.n + kBlockN - 1) / kBlockN;
  const int64_t index = blockIdx.x;
  if constexpr (mode == GemmDirection::kWgrad) {
    const int64_t tiles_m = (args.m + kBlockM - 1) / kBlockM;
    const int64_t group = index / (tiles_m * tiles_n);
    const int64_t tile = index % (tiles_m * tiles_n);
    return {group,
            tile % tiles_m * kBlockM,
            args.m,
            tile / tiles_m * kBlockN,
            args.offsets[group],
            args.offsets[group + 1]};
  } else {
    const int64_t slots = tile_slots(args.rows, args.groups, kBlockM);
    const int64_t panel = index / (slots * kRasterColumns);
    const int64_t left = tiles_n - panel * kRasterColumns;
    const int64_t width = left < kRasterColumns ? left : kRasterColumns;
    const int64_t within = index - panel * slots * kRasterColumns;
    const RaggedTile rows = ragged_tile(args.offsets, args.groups, within / width, kBlockM);
    return {rows.group, rows.begin, rows.end, (panel * kRasterColumns + within % width) * kBlockN, 0, args.k};
  }
}

inline int64_t grouped_tiles(GemmDirection mode, const GroupedGemmArgs& args) {
  const int64_t tiles_n = (args.n + kBlockN - 1) / kBlockN;
  const int64_t tiles_m = mode == GemmDirection::kWgrad ? args.groups * ((args.m + kBlockM - 1) / kBlockM)
                                                        : tile_slots(args.rows, args.groups, kBlockM);
  return tiles_m * tiles_n;
}

// A panel in registers, distributed over the block: OUTER rows of INNER contiguous elements, in vectors of 16
// bytes.
template <typename T, int OUTER, int INNER>
struct Panel {
  static constexpr int kVector = 16 / sizeof(T);
  static constexpr int kPerRow = INNER / kVector;
  static constexpr int kVectors = OUTER * kPerRow / kThreads;
  static_assert(OUTER * kPerRow % kThreads == 0, "every thread copies the same number of vectors");

  union Vector {
    uint4 bits;
    T elements[kVector];
    __device__ Vector() : bits(make_uint4(0, 0, 0, 0)) {}
  };
  Vector vectors[kVectors];

  __device__ static int outer(int v) { return (v * kThreads + static_cast<int>(threadIdx.x)) / kPerRow; }
  __device__ static int inner(int v) {
    return (v * kThreads + static_cast<int>(threadIdx.x)) % kPerRow * kVector;
  }

  // Rows at and past `outer_limit` and elements at and past `inner_limit` become zero.
  __device__ void load(const T* base, int64_t stride, int64_t outer_limit, int64_t inner_limit,
                       bool aligned) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Vector vector;
      const int64_t left = inner_limit - inner(v);
      if (outer(v) < outer_limit && left > 0) {
        const T* source = base + outer(v) * stride + inner(v);
        if (aligned && left >= kVector) {
          vector.bits = *reinterpret_cast<const uint4*>(source);
        } else {
#pragma unroll
          for (int e = 0; e < kVector; ++e) {
            if (e < left) vector.elements[e] = source[e];
          }
        }
      }
      vectors[v] = vector;
    }
  }
};

// The matrix of a group: of the list, or of `stack` if there is no list.
template <typename T>
__device__ __forceinline__ T* group_matrix(const PointerArray& list, T* stack, int64_t group,
                                           int64_t stride) {
  return list.workspace ? static_cast<T* const*>(list.workspace)[group] : stack + group * stride;
}

// Epilogue of one element: alpha, bias, the old value of the output, one rounding.
template <GemmDirection mode>
__device__ __forceinline__ void store_element(const GroupedGemmArgs& args, const OutputTile& tile,
                                              int64_t row, int64_t column, float value) {
  if (row >= tile.m_end || column >= args.n) return;
  // The gradient of a group without rows is zero even if alpha is not finite.
  if (args.alpha && (mode != GemmDirection::kWgrad || tile.k_begin < tile.k_end)) {
    value = value * args.alpha[tile.group];
  }
  const int64_t index = row * args.out_row_stride + column;
  if (mode != GemmDirection::kWgrad && args.bias) {
    const float scale = args.bias_scale ? args.bias_scale[row] : 1.0f;
    value = fmaf(scale, args.bias[tile.group * args.n + column], value);
  }
  const auto store = [&](auto* out) {
    if constexpr (mode == GemmDirection::kWgrad) {
      out = group_matrix(args.list, out, tile.group, args.out_group_stride);
    }
    if (args.accumulate) value = value + to_float(out[index]);
    if (const float beta = args.beta ? args.beta[tile.group] : 0.0f; beta != 0.0f) {
      value = fmaf(beta, to_float(out[index]), value);
    }
    out[index] = from_float<std::remove_reference_t<decltype(*out)>>(value);
  };
  switch (args.out_dtype) {
    case DType::kBFloat16: return store(static_cast<__nv_bfloat16*>(args.out));
    case DType::kFloat16: return store(static_cast<__half*>(args.out));
    default: return store(static_cast<float*>(args.out));
  }
}

// Mma<T, mode> has the accumulators of a block: kBlockK, Shared, store_panels(a, b, shared), mma(shared) and
// epilogue(args, tile, shared).
template <typename T, template <typename, GemmDirection> typename Mma, GemmDirection mode>
__global__ void __launch_bounds__(kThreads) grouped_gemm_kernel(GroupedGemmArgs args) {
  using BlockMma = Mma<T, mode>;
  constexpr int kBlockK = BlockMma::kBlockK;
  constexpr bool a_k_major = mode != GemmDirection::kWgrad;  // k is the inner dimension
  constexpr bool b_k_major = mode == GemmDirection::kFprop;
  __shared__ typename BlockMma::Shared shared;

  const OutputTile tile = find_tile<mode>(args);
  if (tile.m_begin >= tile.m_end) return;
  if (args.accumulate && tile.k_begin >= tile.k_end) return;

  const int64_t a_stride = a_k_major ? args.k : args.m;
  const int64_t b_stride = b_k_major ? args.k : args.n;
  const T* a = static_cast<const T*>(args.a) + (a_k_major ? tile.m_begin * a_stride : tile.m_begin);
  const T* b = static_cast<const T*>(args.b);
  if constexpr (mode != GemmDirection::kWgrad) b = group_matrix(args.list, b, tile.group, args.n * args.k);
  b += b_k_major ? tile.n_begin * b_stride : tile.n_begin;
  const int64_t m_left = tile.m_end - tile.m_begin, n_left = args.n - tile.n_begin;

  Panel<T, a_k_major ? kBlockM : kBlockK, a_k_major ? kBlockK : kBlockM> a_panel;
  Panel<T, b_k_major ? kBlockN : kBlockK, b_k_major ? kBlockK : kBlockN> b_panel;
  const auto load = [&](int64_t k) {
    const int64_t k_left = tile.k_end - k;
    if constexpr (a_k_major) a_panel.load(a + k, a_stride, m_left, k_left, args.rows_16_byte_aligned);
    if constexpr (!a_k_major)
      a_panel.load(a + k * a_stride, a_stride, k_left, m_left, args.rows_16_byte_aligned);
    if constexpr (b_k_major) b_panel.load(b + k, b_stride, n_left, k_left, args.rows_16_byte_aligned);
    if constexpr (!b_k_major)
      b_panel.load(b + k * b_stride, b_stride, k_left, n_left, args.rows_16_byte_aligned);
  };

  BlockMma block_mma;
  if (tile.k_begin < tile.k_end) load(tile.k_begin);
  for (int64_t k = tile.k_begin; k < tile.k_end; k += kBlockK) {
    block_mma.store_panels(a_panel, b_panel, shared);
    __syncthreads();
    if (k + kBlockK < tile.k_end) load(k + kBlockK);
    block_mma.mma(shared);
    __syncthreads();
  }
  block_mma.epilogue(args, tile, shared);
}

template <typename T, template <typename, GemmDirection> typename Mma>
void launch_grouped(GemmDirection mode, const GroupedGemmArgs& args, cudaStream_t stream) {
  const unsigned blocks = grid_size(grouped_tiles(mode, args), 1);
  switch (mode) {
    case GemmDirection::kFprop:
      grouped_gemm_kernel<T, Mma, GemmDirection::kFprop><<<blocks, kThreads, 0, stream>>>(args);
      break;
    case GemmDirection::kDgrad:
      grouped_gemm_kernel<T, Mma, GemmDirection::kDgrad><<<blocks, kThreads, 0, stream>>>(args);
      break;
    case GemmDirection::kWgrad:
      grouped_gemm_kernel<T, Mma, GemmDirection::kWgrad><<<blocks, kThreads, 0, stream>>>(args);
      break;
  }
  check_launch("grouped_kernel");
}

}  // namespace transformer_plugin::gemm
