// The padding of the scales (quantize/args/layout.h), which the block of threads that has the last row writes.
#pragma once

#include "norm/norm_row.cuh"
#include "quantize/args/quantize.h"

namespace transformer_plugin::norm {

// The words of all lines: those of the first tile go on in the ones after it.
__host__ __device__ __forceinline__ quantize::WordLines lines_of_matrix(const quantize::Layout& layout) {
  return quantize::WordLines(layout, quantize::Tile{}, false);
}

// The lines past the matrix, up to a multiple of 128.
__device__ __forceinline__ void zero_lines_past(const quantize::Layout& layout, uint8_t* exponents) {
  const quantize::WordLines lines = lines_of_matrix(layout);
  const int words = static_cast<int>(layout.col_tiles());
  for (int64_t line = layout.rows; line < layout.scale_height(false); ++line) {
    for (int word = threadIdx.x; word < words; word += kThreads) {
      *reinterpret_cast<uint32_t*>(exponents + lines.at(static_cast<int>(line), word)) = 0;
    }
  }
}

// Either kind: also the end of each row of FP32 scales.
__device__ __forceinline__ void zero_scales_past(const quantize::QuantizeArgs& output) {
  const quantize::Layout& layout = output.layout;
  if (layout.mode == quantize::ScaleMode::kMx) return zero_lines_past(layout, output.exponents);
  if (layout.mode == quantize::ScaleMode::kTensor) return;
  const int64_t width = layout.scale_width(false);
  for (int64_t line = threadIdx.x; line < layout.scale_height(false); line += kThreads) {
    for (int64_t i = layout.rows; i < width; ++i) output.scale[line * width + i] = 0.0f;
  }
}

}  // namespace transformer_plugin::norm
