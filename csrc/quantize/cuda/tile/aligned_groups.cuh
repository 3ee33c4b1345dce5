// Stores of transposed tiles in the `aligned` layout (quantize/args/layout.h).
#pragma once

#include "quantize/cuda/tile/tile.cuh"

namespace transformer_plugin::quantize {

// Stores 16 bytes at a multiple of 16 in a row, for any alignment of the buffer itself.
__device__ __forceinline__ void store_chunk(uint8_t* target, uint4 chunk) {
  if (reinterpret_cast<uintptr_t>(target) % 16 == 0) {
    *reinterpret_cast<uint4*>(target) = chunk;
    return;
  }
  const uint32_t words[] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 16; ++i) target[i] = static_cast<uint8_t>(words[i / 4] >> i % 4 * 8);
}

// Stores a transposed tile and the zeros around it. Bytes after the tile's rows are zero. Not inlined:
// kernels for other layouts would lack the registers that it needs.
static __device__ __noinline__ void store_aligned_rows(uint8_t* data_t, const RowTile* table, int rows,
                                                       int cols, int groups, bool zero_tail, int row_tile,
                                                       int col_tile, TransposedTile& transposed_tile) {
  constexpr int kChunks = TransposedTile::kChunks, kLines = kWarpSize / kChunks;
  const Layout layout{1,     rows,  cols,    groups, table,    ScaleGranularity::k1x128,
                      false, false, nullptr, true,   zero_tail};
  const Tile tile = tile_at(layout, static_cast<int64_t>(row_tile) * layout.col_tiles() + col_tile);
  const Gap gap = gap_of(layout, tile);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int chunk = lane % kChunks, chunks = (tile.rows + 15) / 16;
  const int64_t begin = gap.begin - tile.rows, first_zero = begin + chunks * 16;
  const int64_t stride = layout.transposed_row_length();
  uint8_t* first_line = data_t + tile.col * stride;
  if (gap.empty() && chunks == kChunks && reinterpret_cast<uintptr_t>(data_t) % 16 == 0) {
    const int first = warp * (kTile / kWarps) + lane / kChunks;
    uint8_t* target = first_line + first * stride + begin + chunk * 16;
#pragma unroll
    for (int i = 0; i < kTile / kWarps / kLines; ++i, target += kLines * stride) {
      const int column = first + i * kLines;
      if (column < tile.cols) *reinterpret_cast<uint4*>(target) = transposed_tile.chunk(column, chunk);
    }
    return;
  }
#pragma unroll 1
  for (int column = warp * kLines + lane / kChunks; column < tile.cols; column += kWarps * kLines) {
    uint8_t* line = first_line + column * stride;
    if (chunk < chunks) {
      // Warps without rows wrote nothing; a chunk belongs to one warp.
      store_chunk(line + begin + chunk * 16, transposed_tile.chunk(column, chunk));
    }
    for (int64_t i = chunk * 16; i < gap.before; i += kChunks * 16) store_chunk(line + i, uint4{});
    for (int64_t i = first_zero + chunk * 16; i < gap.end; i += kChunks * 16) store_chunk(line + i, uint4{});
  }
}

}  // namespace transformer_plugin::quantize
