// Zeroes the padding of scales (quantize/args/layout.h). Called by the block that has the last row.
#pragma once

#include "norm/norm_row.cuh"
#include "quantize/args/quantize.h"

namespace transformer_plugin::norm {

// The scale words of the whole matrix: those of the first tile, whose indices may go past the tile.
__host__ __device__ __forceinline__ quantize::ScaleWords matrix_scale_words(const quantize::Layout& layout) {
  return quantize::ScaleWords(layout, quantize::Tile{}, false);
}

// Zeroes the words of scale rows after the matrix, up to a multiple of 128.
__device__ __forceinline__ void zero_scale_words_past_rows(const quantize::Layout& layout,
                                                           uint8_t* exponents) {
  const quantize::ScaleWords scale_words = matrix_scale_words(layout);
  const int words = static_cast<int>(layout.col_tiles());
  for (int64_t line = layout.rows; line < layout.scale_height(false); ++line) {
    for (int word = threadIdx.x; word < words; word += kThreads) {
      *reinterpret_cast<uint32_t*>(exponents + scale_words.at(static_cast<int>(line), word)) = 0;
    }
  }
}

// For either kind of scales; FP32 scales have padding at the end of each row.
__device__ __forceinline__ void zero_scales_past_rows(const quantize::QuantizeArgs& output) {
  const quantize::Layout& layout = output.layout;
  if (layout.granularity == quantize::ScaleGranularity::k1x32)
    return zero_scale_words_past_rows(layout, output.exponents);
  if (layout.granularity == quantize::ScaleGranularity::kPerTensor) return;
  const int64_t width = layout.scale_width(false);
  for (int64_t line = threadIdx.x; line < layout.scale_height(false); line += kThreads) {
    for (int64_t i = layout.rows; i < width; ++i) output.scale[line * width + i] = 0.0f;
  }
}

}  // namespace transformer_plugin::norm
