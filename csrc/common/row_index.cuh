// Reads of a row index in kernels (row_index_args.h).
#pragma once

#include "common/row_index_args.h"

namespace transformer_plugin {

__device__ __forceinline__ int64_t entry(const RowIndex& index, int64_t place) {
  return index.is_int64 ? static_cast<const int64_t*>(index.entries)[place]
                        : static_cast<const int32_t*>(index.entries)[place];
}

__device__ __forceinline__ bool is_inside(const RowIndex& index, int64_t row) {
  return row >= 0 && row < index.rows;
}

// The entry at this position is not a row of the matrix: reports it, unless it is kRowOfZeros.
__device__ __forceinline__ void report_wrong_row(WrongRowWord* word, const RowIndex& index, int64_t place) {
  if (entry(index, place) == kRowOfZeros) return;
  word->found = static_cast<uint64_t>(place + 1) << 32 | static_cast<uint32_t>(index.rows);
}

}  // namespace transformer_plugin
