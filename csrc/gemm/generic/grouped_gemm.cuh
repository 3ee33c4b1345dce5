// The skeleton of our grouped products: one block a tile of the output, its group found from the offsets on the
// device; the grid is sized for the capacity, so sizes may change under a captured graph.
//
// Each step of kBlockK copies a panel of `a` and a panel of `b` from global memory to registers while the panels
// of the step before are multiplied from shared memory. Out-of-bounds elements are zeros and never read.
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
inline constexpr int kPanelColumns = 8;  // column tiles that share their rows of `a` in the L2 cache

// One tile of the output.
struct TileWork {
  int64_t group;
  int64_t m_begin, m_end;  // rows of the output: of the buffer, or of the group's matrix of kWgrad
  int64_t n_begin;
  int64_t k_begin, k_end;
};

template <GemmDirection mode>
__device__ __forceinline__ TileWork find_work(const GroupedGemmArgs& args) {
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
    const int64_t panel = index / (slots * kPanelColumns);
    const int64_t left = tiles_n - panel * kPanelColumns;
    const int64_t width = left < kPanelColumns ? left : kPanelColumns;
    const int64_t within = index - panel * slots * kPanelColumns;
    const RaggedTile rows = ragged_tile(args.offsets, args.groups, within / width, kBlockM);
    return {rows.group, rows.begin, rows.end, (panel * kPanelColumns + within % width) * kBlockN, 0, args.k};
  }
}

inline int64_t grouped_tiles(GemmDirection mode, const GroupedGemmArgs& args) {
  const int64_t tiles_n = (args.n + kBlockN - 1) / kBlockN;
  const int64_t tiles_m = mode == GemmDirection::kWgrad ? args.groups * ((args.m + kBlockM - 1) / kBlockM)
                                                        : tile_slots(args.rows, args.groups, kBlockM);
  return tiles_m * tiles_n;
}

// A panel on its way: OUTER rows of INNER consecutive elements, 16 bytes at a time spread over the block.
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

// The matrix of a group that has one: of `stack` where there is no list.
template <typename T>
__device__ __forceinline__ T* matrix_of(const PointerArray& list, T* stack, int64_t group, int64_t stride) {
  return list.room ? static_cast<T* const*>(list.room)[group] : stack + group * stride;
}

// The last step of one element: factor, bias, what was there, one rounding.
template <GemmDirection mode>
__device__ __forceinline__ void finish(const GroupedGemmArgs& args, const TileWork& work, int64_t row,
                                       int64_t column, float sum) {
  if (row >= work.m_end || column >= args.n) return;
  // A group without rows has a gradient of zero, whatever its factor is.
  if (args.alpha && (mode != GemmDirection::kWgrad || work.k_begin < work.k_end)) {
    sum = sum * args.alpha[work.group];
  }
  const int64_t index = row * args.out_row_stride + column;
  if (mode != GemmDirection::kWgrad && args.bias) {
    const float scale = args.bias_scale ? args.bias_scale[row] : 1.0f;
    sum = fmaf(scale, args.bias[work.group * args.n + column], sum);
  }
  const auto store = [&](auto* out) {
    if constexpr (mode == GemmDirection::kWgrad) {
      out = matrix_of(args.list, out, work.group, args.out_group_stride);
    }
    if (args.accumulate) sum = sum + to_float(out[index]);
    if (const float beta = args.beta ? args.beta[work.group] : 0.0f; beta != 0.0f) {
      sum = fmaf(beta, to_float(out[index]), sum);
    }
    out[index] = from_float<std::remove_reference_t<decltype(*out)>>(sum);
  };
  switch (args.out_dtype) {
    case DType::kBFloat16: return store(static_cast<__nv_bfloat16*>(args.out));
    case DType::kFloat16: return store(static_cast<__half*>(args.out));
    default: return store(static_cast<float*>(args.out));
  }
}

// Multiply<T, mode> owns the sums of a block: kBlockK, Shared, add(shared), finish(args, work, shared).
template <typename T, template <typename, GemmDirection> typename Multiply, GemmDirection mode>
__global__ void __launch_bounds__(kThreads) grouped_kernel(GroupedGemmArgs args) {
  using Block = Multiply<T, mode>;
  constexpr int kBlockK = Block::kBlockK;
  constexpr bool a_by_row = mode != GemmDirection::kWgrad;  // k is the inner dimension
  constexpr bool b_by_row = mode == GemmDirection::kFprop;
  __shared__ typename Block::Shared shared;

  const TileWork work = find_work<mode>(args);
  if (work.m_begin >= work.m_end) return;
  if (args.accumulate && work.k_begin >= work.k_end) return;

  const int64_t a_stride = a_by_row ? args.k : args.m;
  const int64_t b_stride = b_by_row ? args.k : args.n;
  const T* a = static_cast<const T*>(args.a) + (a_by_row ? work.m_begin * a_stride : work.m_begin);
  const T* b = static_cast<const T*>(args.b);
  if constexpr (mode != GemmDirection::kWgrad) b = matrix_of(args.list, b, work.group, args.n * args.k);
  b += b_by_row ? work.n_begin * b_stride : work.n_begin;
  const int64_t m_left = work.m_end - work.m_begin, n_left = args.n - work.n_begin;

  Panel<T, a_by_row ? kBlockM : kBlockK, a_by_row ? kBlockK : kBlockM> a_panel;
  Panel<T, b_by_row ? kBlockN : kBlockK, b_by_row ? kBlockK : kBlockN> b_panel;
  const auto load = [&](int64_t k) {
    const int64_t k_left = work.k_end - k;
    if constexpr (a_by_row) a_panel.load(a + k, a_stride, m_left, k_left, args.rows_16_byte_aligned);
    if constexpr (!a_by_row)
      a_panel.load(a + k * a_stride, a_stride, k_left, m_left, args.rows_16_byte_aligned);
    if constexpr (b_by_row) b_panel.load(b + k, b_stride, n_left, k_left, args.rows_16_byte_aligned);
    if constexpr (!b_by_row)
      b_panel.load(b + k * b_stride, b_stride, k_left, n_left, args.rows_16_byte_aligned);
  };

  Block block;
  if (work.k_begin < work.k_end) load(work.k_begin);
  for (int64_t k = work.k_begin; k < work.k_end; k += kBlockK) {
    block.keep(a_panel, b_panel, shared);
    __syncthreads();
    if (k + kBlockK < work.k_end) load(k + kBlockK);
    block.add(shared);
    __syncthreads();
  }
  block.finish(args, work, shared);
}

template <typename T, template <typename, GemmDirection> typename Multiply>
void launch_grouped(GemmDirection mode, const GroupedGemmArgs& args, cudaStream_t stream) {
  const unsigned blocks = grid_size(grouped_tiles(mode, args), 1);
  switch (mode) {
    case GemmDirection::kFprop:
      grouped_kernel<T, Multiply, GemmDirection::kFprop><<<blocks, kThreads, 0, stream>>>(args);
      break;
    case GemmDirection::kDgrad:
      grouped_kernel<T, Multiply, GemmDirection::kDgrad><<<blocks, kThreads, 0, stream>>>(args);
      break;
    case GemmDirection::kWgrad:
      grouped_kernel<T, Multiply, GemmDirection::kWgrad><<<blocks, kThreads, 0, stream>>>(args);
      break;
  }
  check_launch("grouped_kernel");
}

}  // namespace transformer_plugin::gemm
