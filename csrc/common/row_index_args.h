// What the kernels that take rows by an index work on, without torch.
//
// `index` [places] names the rows of a matrix. Places from `end` on are the tail: their entries are never followed. On a
// GPU, where the host does not read the index, an entry outside the matrix counts as a row of zeros and leaves word in memory
// of the host, as wrong group sizes do (offsets.h).
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace transformer_plugin {

// What a GPU noticed about an index, in one store: the place of a wrong entry, plus 1, above the rows of the matrix.
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

// Rows of a matrix by an index, on a GPU.
struct TakenRows {
  RowIndex index;
  const void* matrix;
  int64_t row_bytes;
  int64_t stride_bytes;  // between rows of the matrix
  WrongRowWord* word;
};
// output[i] = matrix[index[i]] for the places before the tail, rows back to back; what is past them stays as it is.
void launch_take_rows(const TakenRows& rows, void* output, void* stream);

// keys[i] = index[i], or `rows` where it is not to be followed.
void launch_row_keys(const RowIndex& index, int32_t* keys, void* stream);

// output[r] = the sum of taken[i] over the places i with index[i] = r, in ascending order of i, from zero, in FP32 (FP64
// for float64), rounded once. `order` are the places in the order of their rows, those of row r from the first of
// `sorted_keys` on that is r.
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
