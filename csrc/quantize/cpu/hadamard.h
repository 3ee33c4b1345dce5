// 16 values of each of up to 128 lines, value by value: what the CPU kernels of NVFP4 work on, in vectors of lines.
#pragma once

#include "common/dtype.h"
#include "quantize/args/layout.h"

namespace transformer_plugin::quantize {

struct Chunk {
  alignas(64) float at[kNvBlock][kTile];
};

// The random Hadamard transform of each of the first lines, rounded to the dtype. `values` and `turned` may not overlap.
void hadamard_cpu(const float (*values)[kTile], int lines, DType dtype, Chunk& turned);

}  // namespace transformer_plugin::quantize
