// Addresses of the one-byte scales of MXFP8 (E8M0) and NVFP4 (E4M3), in both orders that
// quantize/args/layout.h defines. Scales are stored and read as words of four.
#pragma once

#include <cstdint>

#include "common/math.h"

namespace transformer_plugin::gemm {

// Scales of the rows of a stack of matrices, one for each 32 (MXFP8) or 16 (NVFP4) elements of a row. Each
// matrix is padded to a multiple of 128 rows, so rows can be numbered across matrices.
struct ByteScales {
  const uint8_t* bytes;
  int64_t width;  // scales of a row, a multiple of 4
  bool tiled;     // tiles of 128 rows x 4 scales, otherwise row-major

  // First word of a row.
  TP_HOST_DEVICE const uint8_t* row(int64_t index) const {
    if (!tiled) return bytes + index * width;
    return bytes + index / 128 * 128 * width + index % 32 * 16 + index % 128 / 32 * 4;
  }
  // Bytes from a word of a row to the next word of the same row.
  TP_HOST_DEVICE int word_stride() const { return tiled ? 512 : 4; }
  // Bytes from a row to the next one, within four rows that begin at a multiple of 4.
  TP_HOST_DEVICE int64_t row_stride() const { return tiled ? 16 : width; }
};

}  // namespace transformer_plugin::gemm
