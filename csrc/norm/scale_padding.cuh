// The padding of the scales, by the block of threads that has the last row.
#pragma once

#include "norm/norm_row.cuh"
#include "quantize/quantize.h"

namespace transformer_plugin::norm {

// E8M0: the lines past the matrix.
__device__ __forceinline__ void zero_lines_past(const quantize::Layout& layout, uint8_t* exponents) {
  const int64_t words = layout.scale_width(false) / 4;
  for (int64_t line = layout.rows; line < layout.scale_height(false); ++line) {
    for (int64_t word = threadIdx.x; word < words; word += kThreads) {
      *reinterpret_cast<uint32_t*>(exponents + matrix_word_index(layout, 0, false, line, word)) = 0;
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
