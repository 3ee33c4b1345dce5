// Finds the matrix of a list that a block works on.
#pragma once

#include "quantize/args/quantize_list.h"
#include "quantize/cuda/tile/tile.cuh"

namespace transformer_plugin::quantize {

// The last matrix that begins at or before this block.
template <typename Args>
__device__ __forceinline__ int list_entry_of_block(const Args& args) {
  int low = 0, high = args.tensors - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (args.first_block[middle] <= static_cast<int>(blockIdx.x)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace transformer_plugin::quantize
