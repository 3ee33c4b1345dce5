// Tensor maps: how a matrix lies in memory, for copies of boxes of it.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/dtype.h"
#include "gemm/args/pointer_array.h"

namespace transformer_plugin::gemm {

// A stack of matrices whose rows have inner stride 1, and boxes of `box_rows` rows by 128 bytes, which lie in shared memory
// under the swizzle of that width. Strides count elements; those in bytes are multiples of 16, as is the address.
struct Stack {
  const void* data;
  DType dtype;
  int64_t columns, rows, count;
  int64_t row_stride, matrix_stride;
};
CUtensorMap tensor_map(const Stack& stack, int box_rows);

// Scales, float32 [count, rows, columns], and boxes of `box_rows` by `box_columns` of a matrix, row by row. Columns are a
// multiple of 4, and so is the first of a box.
struct Scales {
  const void* data;
  int64_t count, rows, columns;
};
CUtensorMap scale_map(const Scales& scales, int box_rows, int box_columns);

// SwiGLU's [rows, 2 features], 16-bit, as pairs of columns that belong together: the gate's `features` columns, then the linear
// part's, or `interleaved`, 32 columns of each in turn. A box is `box_rows` rows of 32 columns of the gate and of the 32 of the
// linear part, 64 bytes each, which lie in shared memory under the swizzle of that width. Its coordinates are column, 0, row;
// of interleaved columns 0, column / 16, row.
struct Halves {
  const void* data;
  DType dtype;
  int64_t rows, features;
  bool interleaved;
};
CUtensorMap halves_map(const Halves& halves, int box_rows);

// Launches what fills the room of a list; nothing for a stack. With `map`, of one matrix, that is also a copy of it for
// each matrix, with its address. Those are returned: the kernel that is launched next acquires each before it uses it.
const CUtensorMap* launch_pointer_array(const PointerArray& list, int64_t groups, const CUtensorMap* map,
                                        void* stream);

}  // namespace transformer_plugin::gemm
