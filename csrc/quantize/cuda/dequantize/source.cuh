// The source of requantize_transposed: dequantized values, rounded to the intermediate dtype.
#pragma once

#include "quantize/cuda/dequantize/common.cuh"
#include "quantize/cuda/tile/common.cuh"

namespace transformer_plugin::quantize {

// A thread's elements of a tile, one word of 4 columns per row; zero outside the matrix and in the tail.
__device__ __forceinline__ void load_tile_bytes(const DequantizeArgs& from, const Tile& tile, int warp,
                                                int lane, uint32_t (&bytes)[kRowsPerThread]) {
  const int64_t cols = from.layout.cols;
  const int first_row = warp * kRowsPerThread, c0 = lane * kColsPerThread;
  const int rows = tile.tail ? 0 : tile.rows - first_row;
  const uint8_t* source =
      from.data + (tile.matrix * from.layout.rows + tile.row + first_row) * cols + tile.col + c0;
  if (cols % 4 == 0 && is_word_aligned(from.data) &&
      tile.cols == kTile) {  // all loads are issued before the first use
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      bytes[r] = r < rows ? *reinterpret_cast<const uint32_t*>(source + r * cols) : 0;
    }
    return;
  }
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    bytes[r] = r < rows ? load_bytes(source + r * cols, tile.cols - c0, false).word : 0;
  }
}

template <typename T, DType element>
struct DequantizeSource {
  using Value = T;
  static constexpr int kBlocks = sizeof(T) == 2 ? 3 : 2;

  DequantizeArgs from;

  __device__ __forceinline__ void load(const QuantizeArgs&, const Tile& tile, int warp, int lane,
                                       TileFragment<T>& values) const {
    uint32_t bytes[kRowsPerThread];
    load_tile_bytes(from, tile, warp, lane, bytes);
    // A scale belongs to a row, or for k1x32 to 32 columns of a row. Lane l loads those of row l % 16. Two
    // E8M0 scales as floats fit one register: powers of two or NaN, they need only their upper halves.
    const bool mx = from.layout.granularity == ScaleGranularity::k1x32;
    const int row = warp * kRowsPerThread + lane % kRowsPerThread;
    const int block = lane / kRowsPerThread;  // and block + 2
    const auto bits_of = [&](int b) { return float_to_bits(scale_at(from, tile, row, b * kMxBlock)); };
    uint32_t scale_bits = 0;
    if (!tile.tail && row < tile.rows) {
      if (block * kMxBlock < tile.cols) scale_bits = mx ? bits_of(block) >> 16 : bits_of(0);
      if (mx && (block + 2) * kMxBlock < tile.cols) scale_bits |= bits_of(block + 2) & 0xffff0000u;
    }
    const int own_block = lane * kColsPerThread / kMxBlock;
    const int first_holder = mx ? own_block % 2 * kRowsPerThread : 0;
    const uint32_t mask = mx ? 0xffff0000u : 0xffffffffu;
    const int shift = mx && own_block < 2 ? 16 : 0;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const uint32_t bits = __shfl_sync(0xffffffffu, scale_bits, first_holder + r);
      const float scale = bits_to_float((bits << shift) & mask);
      const float2 a = decode2<element>(bytes[r] & 0xffffu), b = decode2<element>(bytes[r] >> 16);
      values.at[r][0] = two_from_floats<T>(a.x * scale, a.y * scale);
      values.at[r][1] = two_from_floats<T>(b.x * scale, b.y * scale);
    }
  }
};

}  // namespace transformer_plugin::quantize
