// Transposed tiles into the lines of a layout whose groups are aligned (quantize/args/layout.h).
#pragma once

#include "quantize/cuda/tile/tile.cuh"

namespace transformer_plugin::quantize {

// 16 bytes to a multiple of 16 in a line, wherever the buffer itself begins.
__device__ __forceinline__ void store_chunk(uint8_t* target, uint4 chunk) {
  if (reinterpret_cast<uintptr_t>(target) % 16 == 0) {
    *reinterpret_cast<uint4*>(target) = chunk;
    return;
  }
  const uint32_t words[] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 16; ++i) target[i] = static_cast<uint8_t>(words[i / 4] >> i % 4 * 8);
}

// A turned tile into aligned lines, with the zeros around it. Codes past the tile's rows are zero. A call, as are no others: the
// registers that it needs, kernels would otherwise lack where lines are not aligned.
static __device__ __noinline__ void store_aligned_lines(uint8_t* data_t, const RowTile* table, int rows,
                                                        int cols, int groups, int row_tile, int col_tile,
                                                        TransposedTile& turned) {
  constexpr int kChunks = TransposedTile::kChunks, kLines = kWarpSize / kChunks;
  const Layout layout{1, rows, cols, groups, table, ScaleMode::kRows, false, false, nullptr, true};
  const Tile tile = tile_at(layout, static_cast<int64_t>(row_tile) * layout.col_tiles() + col_tile);
  const Gap gap = gap_of(layout, tile);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int chunk = lane % kChunks, chunks = (tile.rows + 15) / 16;
  const int64_t begin = gap.begin - tile.rows, first_zero = begin + chunks * 16;
  const int64_t stride = layout.line_length();
  uint8_t* first_line = data_t + tile.col * stride;
  if (gap.empty() && chunks == kChunks && reinterpret_cast<uintptr_t>(data_t) % 16 == 0) {
    const int first = warp * (kTile / kWarps) + lane / kChunks;
    uint8_t* target = first_line + first * stride + begin + chunk * 16;
#pragma unroll
    for (int i = 0; i < kTile / kWarps / kLines; ++i, target += kLines * stride) {
      const int column = first + i * kLines;
      if (column < tile.cols) *reinterpret_cast<uint4*>(target) = turned.chunk(column, chunk);
    }
    return;
  }
#pragma unroll 1
  for (int column = warp * kLines + lane / kChunks; column < tile.cols; column += kWarps * kLines) {
    uint8_t* line = first_line + column * stride;
    if (chunk < chunks) {
      // Warps that have no rows wrote nothing, and a chunk is a warp's.
      store_chunk(line + begin + chunk * 16, turned.chunk(column, chunk));
    }
    for (int64_t i = chunk * 16; i < gap.before; i += kChunks * 16) store_chunk(line + i, uint4{});
    for (int64_t i = first_zero + chunk * 16; i < gap.end; i += kChunks * 16) store_chunk(line + i, uint4{});
  }
}

}  // namespace transformer_plugin::quantize
