// Tensor maps: how a matrix lies in memory, for copies of boxes of it.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/dtype.h"
#include "gemm/matrix_list.h"

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

// Launches what fills the room of a list; nothing for a stack. With `map`, of one matrix, that is also a copy of it for
// each matrix, with its address. Those are returned: the kernel that is launched next acquires each before it uses it.
const CUtensorMap* launch_matrix_list(const MatrixList& list, int64_t groups, const CUtensorMap* map,
                                      void* stream);

}  // namespace transformer_plugin::gemm
