// The kernels of plain NVFP4: whole tiles of 16-bit values (nv_whole.cuh), all other tiles, and rows alone.
#pragma once

#include <algorithm>

#include "quantize/cuda/nvfp4/full_tiles.cuh"
#include "quantize/cuda/nvfp4/tile.cuh"

namespace transformer_plugin::quantize {

// Every tile, or by any number of blocks those that nv_whole_kernel leaves. Most of these blocks' tiles are not left, so the
// threads look at one each.
template <typename T, NvCoding coding, bool hadamard>
__device__ __forceinline__ void quantize_nv_tiles(const NvArgs& args, bool all, NvShared<T>& shared) {
  __shared__ uint32_t left[kWarps];  // of the tiles that the threads look at, a bit each
  const uint32_t tiles = static_cast<uint32_t>(args.layout.tiles()), step = gridDim.x;
  const bool all_at_once = !all && args.layout.grouped();  // of what tiles without rows have to store
  if (all_at_once) {
    zero_unused_words(args.layout, args.layout.row_tile_table[0].used, args.scale_t,
                      blockIdx.x * kThreads + threadIdx.x, step * kThreads);
  }
  for (uint32_t first = blockIdx.x; first < tiles; first += kThreads * step) {
    const uint32_t own = first + threadIdx.x * step;
    bool is_left = own < tiles;
    if (is_left && !all) {
      const Tile tile = tile_at(args.layout, own);
      is_left = !is_whole(tile) && (tile.rows > 0 || !all_at_once);
    }
    const uint32_t wanted = __ballot_sync(0xffffffffu, is_left);
    if (threadIdx.x % kWarpSize == 0) left[threadIdx.x / kWarpSize] = wanted;
    __syncthreads();
    for (uint32_t warp = 0; warp < kWarps; ++warp) {
      for (uint32_t bits = left[warp]; bits != 0; bits &= bits - 1) {
        const uint32_t number = warp * kWarpSize + static_cast<uint32_t>(__ffs(static_cast<int>(bits)) - 1);
        quantize_nv_tile<coding, hadamard>(args, tile_at(args.layout, first + number * step), shared);
        __syncthreads();  // before shared memory is used again
      }
    }
    __syncthreads();  // before bits are
  }
}

// Where it has only what nv_whole_kernel leaves it starts when the last blocks of that one have, and works beside them: no
// tile of one is written by the other. It ends after it, for what comes next waits for this kernel alone.
template <typename T, NvCoding coding, bool hadamard>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2)
    quantize_nv_kernel(const __grid_constant__ NvArgs args, bool all) {
  __shared__ NvShared<T> shared;
  if (!args.is_noop()) quantize_nv_tiles<T, coding, hadamard>(args, all, shared);
  pdl_wait();
}

// Rows alone, with scales of 1x16, of an input that is aligned to 16 bytes. A thread has every 32nd row of a block of the
// tile; the loads of two of them are under way together.
template <typename T, NvCoding coding>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 4 : 2)
    quantize_nv_rows_kernel(const __grid_constant__ NvArgs args) {
  constexpr int kStep = kThreads / kNvBlocks;
  if (args.is_noop()) return;
  const Layout& layout = args.layout;
  for_each_tile(
      layout,
      [&](const Tile& tile) {
        if (!begin_nv_tile(args, tile)) return;
        const int block = threadIdx.x % kNvBlocks;
        const NvRows rows(args, tile, block);
        const bool exists = !tile.tail && rows.has_codes;
#pragma unroll 1
        for (int row = threadIdx.x / kNvBlocks; row < tile.rows; row += 2 * kStep) {
          const T* source =
              static_cast<const T*>(args.input) + rows.first_element + rows.blocks_to(row) * kNvBlock;
          NvPairs<T> pairs[2];
          load_block<T>(source, exists, pairs[0]);
          load_block<T>(source + kStep * layout.cols, exists && row + kStep < tile.rows, pairs[1]);
          write_row_block<coding, T>(args, tile, rows, pairs[0], row, false, 0.0f);
          write_row_block<coding, T>(args, tile, rows, pairs[1], row + kStep, false, 0.0f);
        }
      },
      false);
}

template <typename T, NvCoding coding, bool hadamard>
void launch_quantize_nv_as(const NvArgs& args, void* stream) {
  const Layout& layout = args.layout;
  const unsigned grid = block_grid(layout);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const bool aligned = reinterpret_cast<uintptr_t>(args.input) % 16 == 0;
  if constexpr (sizeof(T) == 2 && coding != NvCoding::kFourOverSix) {
    if (takes_whole_tiles(args)) {
      constexpr unsigned kMostBlocks = 512;  // each looks through a few tiles, most of which are not its
      launch_nv_whole<T, coding, hadamard>(args, cuda_stream);
      if (may_have_other_tiles(layout)) {
        launch_pdl(quantize_nv_kernel<T, coding, hadamard>, std::min(grid, kMostBlocks), kThreads, 0,
                   cuda_stream, args, false);
      }
      return check_launch("quantize_nv_kernel");
    }
  }
  if (!hadamard && !args.transposed && !layout.square && aligned) {
    quantize_nv_rows_kernel<T, coding><<<grid, kThreads, 0, cuda_stream>>>(args);
  } else {
    quantize_nv_kernel<T, coding, hadamard><<<grid, kThreads, 0, cuda_stream>>>(args, true);
  }
  check_launch("quantize_nv_kernel");
}

template <typename T>
void launch_quantize_nv_of(const NvArgs& args, void* stream) {
  if (tile_grid(args.layout) == 0) return;
  const bool hadamard = args.hadamard && args.transposed;
  if (is_four_over_six(args.method)) {
    launch_quantize_nv_as<T, NvCoding::kFourOverSix, false>(args, stream);
  } else if (args.method == NvMethod::kStochastic) {
    hadamard ? launch_quantize_nv_as<T, NvCoding::kStochastic, true>(args, stream)
             : launch_quantize_nv_as<T, NvCoding::kStochastic, false>(args, stream);
  } else {
    hadamard ? launch_quantize_nv_as<T, NvCoding::kNearest, true>(args, stream)
             : launch_quantize_nv_as<T, NvCoding::kNearest, false>(args, stream);
  }
}

}  // namespace transformer_plugin::quantize
