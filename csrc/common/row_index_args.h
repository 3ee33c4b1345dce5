// The arguments of kernels that gather rows by an index.
//
// `index` [places] contains row numbers of a matrix, or kRowOfZeros. Places from `end` on are the tail and
// are ignored. On a GPU, where the host does not read the index, any other entry counts as a row of zeros too
// and is reported in pinned host memory, like wrong group sizes (offsets.h).
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace transformer_plugin {

// The entry of a place that takes no row of the matrix, but zeros.
inline constexpr int kRowOfZeros = -1;

// A report about an index on a GPU, written by one store: the place of a wrong entry plus 1 in the upper
// half, the rows of the matrix in the lower.
struct WrongRowWord {
  volatile uint64_t found;
};
WrongRowWord* wrong_row_word();

struct RowIndex {
  const void* entries;  // [places], int32 or int64
  bool is_int64;
  int64_t places;
  int64_t rows;        // of the matrix
  const int32_t* end;  // on the device of the entries
};

// Rows of a matrix gathered by an index.
struct GatheredRows {
  RowIndex index;
  const void* matrix;
  int64_t row_bytes;
  int64_t stride_bytes;  // between rows of the matrix
  WrongRowWord* word;    // null on a CPU
};
// output[i] = matrix[index[i]] for the places before the tail, contiguous rows; output after them is not
// written. On a CPU, entries have been checked.
void take_rows_cpu(const GatheredRows& rows, void* output);
void launch_take_rows(const GatheredRows& rows, void* output, void* stream);

// keys[i] = index[i], or `rows` if the entry is to be ignored.
void launch_row_keys(const RowIndex& index, int32_t* keys, void* stream);

// output[r] = the sum of taken[i] over the places i with index[i] = r, in ascending order of i, from zero, in
// FP32 (FP64 for float64), rounded once. `order` lists the places sorted by row; those of row r begin where
// `sorted_keys` first equals r.
struct SumTakenRowsArgs {
  const void* taken;  // [places, width]
  const int32_t* sorted_keys;
  const int64_t* order;
  void* output;  // [rows, width]
  int64_t places;
  int64_t rows;
  int64_t width;
  DType dtype;
};
void sum_taken_rows_cpu(const SumTakenRowsArgs& args);
void launch_sum_taken_rows(const SumTakenRowsArgs& args, void* stream);

}  // namespace transformer_plugin
