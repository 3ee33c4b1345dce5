// Sixteen values of each of up to 128 vectors, stored value by value: the unit of work of the NVFP4 CPU
// kernels. A vector is a row of the quantized data: a row of the tile, or a column for transposed data.
#pragma once

#include "common/dtype.h"
#include "quantize/args/layout.h"

namespace transformer_plugin::quantize {

struct Chunk {
  alignas(64) float at[kNvBlock][kTile];
};

// The random Hadamard transform of each of the first `rows` vectors, rounded to the dtype. `values` and
// `output` may not overlap.
void hadamard_cpu(const float (*values)[kTile], int rows, DType dtype, Chunk& output);

}  // namespace transformer_plugin::quantize
