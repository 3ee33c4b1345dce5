// Where the E8M0 words of a row lie (quantize/tiles.h), and the padding of the scales, which the block of threads that has
// the last row writes.
#pragma once

#include "norm/norm_row.cuh"
#include "quantize/quantize.h"

namespace transformer_plugin::norm {

// A word has the scales of 128 columns of a row.
struct ExponentWords {
  uint32_t count;  // of a row
  bool tiled;

  __host__ __device__ __forceinline__ explicit ExponentWords(const quantize::Layout& layout)
      : count(static_cast<uint32_t>(layout.col_tiles())), tiled(layout.tiled) {}

  __device__ __forceinline__ uint32_t* at(uint8_t* exponents, int64_t row, uint32_t word) const {
    const uint64_t r = static_cast<uint64_t>(row);
    uint32_t* words = reinterpret_cast<uint32_t*>(exponents);
    if (!tiled) return words + r * count + word;
    return words + (r / quantize::kTile * count + word) * quantize::kTile + r % 32 * 4 +
           r % quantize::kTile / 32;
  }
};

// The lines past the matrix, up to a multiple of 128.
__device__ __forceinline__ void zero_lines_past(const quantize::Layout& layout, uint8_t* exponents) {
  const ExponentWords words(layout);
  for (int64_t line = layout.rows; line < layout.scale_height(false); ++line) {
    for (uint32_t word = threadIdx.x; word < words.count; word += kThreads) {
      *words.at(exponents, line, word) = 0;
    }
  }
}

// Either kind: also the end of each row of FP32 scales.
__device__ __forceinline__ void zero_scales_past(const quantize::QuantizeArgs& output) {
  const quantize::Layout& layout = output.layout;
  if (layout.mode == quantize::ScaleMode::kMx) return zero_lines_past(layout, output.exponents);
  const int64_t width = layout.scale_width(false);
  for (int64_t line = threadIdx.x; line < layout.scale_height(false); line += kThreads) {
    for (int64_t i = layout.rows; i < width; ++i) output.scale[line * width + i] = 0.0f;
  }
}

}  // namespace transformer_plugin::norm
