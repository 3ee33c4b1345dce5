// Where kernels find scales of one byte, in the two orders in which quantize/args/layout.h stores words of four.
#pragma once

#include <cstdint>

#include "common/math.h"

namespace transformer_plugin::gemm {

// One for so many codes of each line. Matrices of a stack have a multiple of 128 lines each, so that their lines count on from
// one matrix to the next.
struct ByteScales {
  const uint8_t* bytes;
  int64_t width;  // of a line, a multiple of 4
  bool tiled;     // in tiles of 128 lines by one word, those of 128 lines beside each other

  // A line's first word, and the bytes from there to the next.
  TP_HOST_DEVICE const uint8_t* line(int64_t number) const {
    if (!tiled) return bytes + number * width;
    return bytes + number / 128 * 128 * width + number % 32 * 16 + number % 128 / 32 * 4;
  }
  TP_HOST_DEVICE int word_stride() const { return tiled ? 512 : 4; }
  // From a line to the next of four that begin at a multiple of 4.
  TP_HOST_DEVICE int64_t line_stride() const { return tiled ? 16 : width; }
};

}  // namespace transformer_plugin::gemm
