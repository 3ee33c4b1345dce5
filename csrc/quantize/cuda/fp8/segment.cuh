// What the two kernels for ragged transposed data share (ragged_transpose.cuh, aligned_transpose.cuh): the
// split of row tiles into parts, and a segment, the 16 rows that one warp holds in registers.
#pragma once

#include "quantize/cuda/fp8/tile.cuh"

namespace transformer_plugin::quantize {

inline constexpr int kRing = kTile;  // input rows in the ring in shared memory
inline constexpr int kChunk = 16;    // bytes of one store, and rows of a segment
// Row tiles per part where ends of parts cost nothing: two, so that one is loaded while the other is encoded.
inline constexpr int kTilesPerPart = 2;

// The first of `tiles` row tiles of part `part` of `parts`.
__device__ __forceinline__ int first_of_part(int part, int parts, int tiles) {
  return tiles / parts * part + min(part, tiles % parts);
}

// A value that is the same in all threads of a warp, in a form from which the compiler knows it: it then uses
// a uniform register and emits no divergent branches.
__device__ __forceinline__ int warp_uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }
__device__ __forceinline__ RowTile warp_uniform(const RowTile& tile) {
  return {warp_uniform(tile.group), warp_uniform(tile.row), static_cast<int16_t>(warp_uniform(tile.rows)),
          tile.all_groups_aligned,  tile.last_of_group,     tile.used_row_tiles};
}

// The scale of one row of the segment per lane: of row RowMaxima::first_of(lane).
template <typename T>
__device__ __forceinline__ float segment_row_scale(const TileFragment<T>& values, int lane,
                                                   const ScaleRule& rule) {
  RowMaxima<kRowsPerThread, T> maxima;
  maxima.find(values, lane);
  const float own_half = maxima.amax(0);
  const float other_half = __shfl_xor_sync(0xffffffffu, own_half, kRowsPerThread);
  return encode_scale(fmaxf(own_half, other_half), rule);
}

// Encodes a segment. Row-wise data is stored for the rows in the bit mask `written`; transposed data of the
// lane's columns is returned in `words`, 4 rows per word. With `blocks`, `row_scale` is the scale of the row
// that the lane holds; otherwise it is one scale for all rows.
template <DType element, bool blocks, typename T>
__device__ __forceinline__ void encode_segment(const TileFragment<T>& values, float row_scale,
                                               const float (&scales)[kColsPerThread], uint32_t written,
                                               uint8_t* target, uint32_t step,
                                               uint32_t (&words)[kColsPerThread][kRowsPerThread / 4]) {
#pragma unroll
  for (int word = 0; word < kRowsPerThread / 4; ++word) {
    float scaled[4][kColsPerThread];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 4 * word + i;
      const float of_row =
          blocks ? __shfl_sync(0xffffffffu, row_scale, RowMaxima<kRowsPerThread, T>::lane_of(r)) : row_scale;
      float value[kColsPerThread];
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) {
        value[c] = values.get(r, c);
        scaled[i][c] = value[c] * scales[c];
      }
      const Bytes4 bytes =
          encode4<element>(value[0] * of_row, value[1] * of_row, value[2] * of_row, value[3] * of_row);
      if (written & (1u << r)) *reinterpret_cast<uint32_t*>(step_to(target, step, r)) = bytes.word;
    }
#pragma unroll
    for (int c = 0; c < kColsPerThread; ++c) {
      words[c][word] = encode4<element>(scaled[0][c], scaled[1][c], scaled[2][c], scaled[3][c]).word;
    }
  }
}

}  // namespace transformer_plugin::quantize
