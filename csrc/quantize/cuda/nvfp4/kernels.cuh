// NVFP4 kernels for a whole matrix, and the function that chooses among them. Formulas:
// quantize/args/quantize_nv.h.
//
// Input: [matrices, rows, cols] in BF16, FP16 or FP32. There are three kernels:
//   quantize_nv_full_tiles_kernel  full tiles of 16-bit values with transposed data (full_tiles.cuh)
//   quantize_nv_kernel             any tiles, or those that the kernel above leaves (tile.cuh)
//   quantize_nv_rows_kernel        row-wise data only, without shared memory
// All have blocks of 256 threads.
#pragma once

#include <algorithm>

#include "quantize/cuda/nvfp4/full_tiles.cuh"
#include "quantize/cuda/nvfp4/tile.cuh"

namespace transformer_plugin::quantize {

// Quantizes every tile, or with `all` false those that quantize_nv_full_tiles_kernel leaves, by any number of
// blocks. In the latter case most tiles of a block are full, so each thread tests one tile.
template <typename T, NvEncoding encoding, bool hadamard>
__device__ __forceinline__ void quantize_nv_tiles(const NvArgs& args, bool all, NvShared<T>& shared) {
  __shared__ uint32_t left[kWarps];  // bit mask over the tiles that the threads test
  const uint32_t tiles = static_cast<uint32_t>(args.layout.tiles()), step = gridDim.x;
  const bool all_at_once = !all && args.layout.grouped();  // zero the scales of unused row tiles together
  if (all_at_once && args.layout.zero_tail) {
    zero_unused_words(args.layout, args.layout.row_tile_table[0].used_row_tiles, args.scale_t,
                      blockIdx.x * kThreads + threadIdx.x, step * kThreads);
  }
  for (uint32_t first = blockIdx.x; first < tiles; first += kThreads * step) {
    const uint32_t own = first + threadIdx.x * step;
    bool is_left = own < tiles;
    if (is_left && (!all || !args.layout.zero_tail)) {
      const Tile tile = tile_at(args.layout, own);
      const bool is_open = all || (!is_full_tile(tile) && (tile.rows > 0 || !all_at_once));
      is_left = is_open && !is_left_out(args.layout, tile);
    }
    const uint32_t wanted = __ballot_sync(0xffffffffu, is_left);
    if (threadIdx.x % kWarpSize == 0) left[threadIdx.x / kWarpSize] = wanted;
    __syncthreads();
    for (uint32_t warp = 0; warp < kWarps; ++warp) {
      for (uint32_t bits = left[warp]; bits != 0; bits &= bits - 1) {
        const uint32_t number = warp * kWarpSize + static_cast<uint32_t>(__ffs(static_cast<int>(bits)) - 1);
        quantize_nv_tile<encoding, hadamard>(args, tile_at(args.layout, first + number * step), shared);
        __syncthreads();  // before shared memory is reused
      }
    }
    __syncthreads();  // before `left` is reused
  }
}

// After quantize_nv_full_tiles_kernel (`all` false) it starts when the last blocks of that kernel have
// started, and runs concurrently: no tile is stored by both. It waits for that kernel at its end, because
// later kernels wait only for this one.
template <typename T, NvEncoding encoding, bool hadamard>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2)
    quantize_nv_kernel(const __grid_constant__ NvArgs args, bool all) {
  __shared__ NvShared<T> shared;
  if (!args.is_noop()) quantize_nv_tiles<T, encoding, hadamard>(args, all, shared);
  pdl_wait();
}

// Row-wise data only, 1x16 scales, 16-byte aligned input. A thread processes every 32nd row of one block
// column of the tile; the loads of two rows are issued together.
template <typename T, NvEncoding encoding>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 4 : 2)
    quantize_nv_rows_kernel(const __grid_constant__ NvArgs args) {
  constexpr int kStep = kThreads / kNvBlocksPerRow;
  if (args.is_noop()) return;
  const Layout& layout = args.layout;
  for_each_tile(
      layout,
      [&](const Tile& tile) {
        if (!begin_nv_tile(args, tile)) return;
        const int block = threadIdx.x % kNvBlocksPerRow;
        const NvRows rows(args, tile, block);
        const bool exists = !tile.tail && rows.has_data;
#pragma unroll 1
        for (int row = threadIdx.x / kNvBlocksPerRow; row < tile.rows; row += 2 * kStep) {
          const T* source =
              static_cast<const T*>(args.input) + rows.first_element + rows.blocks_to(row) * kNvBlock;
          NvPairs<T> pairs[2];
          load_block<T>(source, exists, pairs[0]);
          load_block<T>(source + kStep * layout.cols, exists && row + kStep < tile.rows, pairs[1]);
          write_row_block<encoding, T>(args, tile, rows, pairs[0], row, false, 0.0f);
          write_row_block<encoding, T>(args, tile, rows, pairs[1], row + kStep, false, 0.0f);
        }
      },
      false);
}

// The C++ type of an input dtype.
template <DType dtype>
using DeviceType = std::conditional_t<dtype == DType::kBFloat16, __nv_bfloat16,
                                      std::conditional_t<dtype == DType::kFloat16, __half, float>>;

// Calls fn(encoding, hadamard) with both as integral constants. Four-over-six excludes the transform.
template <typename Fn>
void visit_nv_options(const NvArgs& args, Fn&& fn) {
  using Nearest = std::integral_constant<NvEncoding, NvEncoding::kNearest>;
  using Stochastic = std::integral_constant<NvEncoding, NvEncoding::kStochastic>;
  using FourOverSix = std::integral_constant<NvEncoding, NvEncoding::kFourOverSix>;
  if (is_four_over_six(args.method)) return fn(FourOverSix{}, std::false_type{});
  const bool hadamard = args.hadamard && args.transposed;
  if (args.method == NvMethod::kStochastic) {
    return hadamard ? fn(Stochastic{}, std::true_type{}) : fn(Stochastic{}, std::false_type{});
  }
  hadamard ? fn(Nearest{}, std::true_type{}) : fn(Nearest{}, std::false_type{});
}

template <DType dtype>
void launch_quantize_nv(const NvArgs& args, void* stream) {
  using T = DeviceType<dtype>;
  const Layout& layout = args.layout;
  if (tile_grid(layout) == 0) return;
  const unsigned grid = block_grid(layout);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const bool aligned = reinterpret_cast<uintptr_t>(args.input) % 16 == 0;
  visit_nv_options(args, [&](auto encoding, auto hadamard) {
    constexpr NvEncoding kEncoding = decltype(encoding)::value;
    constexpr bool kHadamard = decltype(hadamard)::value;
    if constexpr (sizeof(T) == 2 && kEncoding != NvEncoding::kFourOverSix) {
      if (supports_full_tiles(args)) {
        launch_pdl(quantize_nv_full_tiles_kernel<T, kEncoding, kHadamard>, full_tile_grid(layout), kThreads,
                   0, cuda_stream, args);
        check_launch("quantize_nv_full_tiles_kernel");
        if (may_have_partial_tiles(layout)) {
          constexpr unsigned kMaxBlocks = 512;  // each searches a few tiles for partial ones; most are full
          launch_pdl(quantize_nv_kernel<T, kEncoding, kHadamard>, std::min(grid, kMaxBlocks), kThreads, 0,
                     cuda_stream, args, false);
        }
        return;
      }
    }
    if (!kHadamard && !args.transposed && !layout.square && aligned) {
      quantize_nv_rows_kernel<T, kEncoding><<<grid, kThreads, 0, cuda_stream>>>(args);
    } else {
      quantize_nv_kernel<T, kEncoding, kHadamard><<<grid, kThreads, 0, cuda_stream>>>(args, true);
    }
  });
  check_launch("quantize_nv_kernel");
}

}  // namespace transformer_plugin::quantize
