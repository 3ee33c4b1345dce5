// Tensor maps (CUtensorMap): how a tensor lies in global memory and which boxes of it TMA copies.
//
// A box begins at a multiple of 16 bytes in memory: not only the address and the strides are such multiples,
// but also the innermost start coordinate, in bytes. The PTX ISA does not say so; measured on an H200, a load
// from another coordinate fails with an illegal instruction (CUDA error 715).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/dtype.h"
#include "gemm/args/pointer_array.h"

namespace transformer_plugin::gemm {

// A stack of row-major matrices [count, rows, columns]. A box has `box_rows` rows of 128 bytes, with the
// 128-byte swizzle in shared memory. Strides count elements; in bytes they and the address are multiples of
// 16.
struct Stack {
  const void* data;
  DType dtype;
  int64_t columns, rows, count;
  int64_t row_stride, matrix_stride;
};
CUtensorMap tensor_map(const Stack& stack, int box_rows);

// FP32 scales [count, rows, columns], and boxes of `box_rows` x `box_columns`, without swizzle. `columns` is
// a multiple of 4, and a box begins at a multiple of 4 columns.
struct Scales {
  const void* data;
  int64_t count, rows, columns;
};
CUtensorMap scale_map(const Scales& scales, int box_rows, int box_columns);

// For a list of matrices: launches a kernel that writes the list's addresses to `list.workspace` and, if
// `map` is not null, a copy of `map` with the address of each matrix. Returns these tensor maps; the next
// kernel calls fence_tensormap_acquire before it uses one. For a stack: launches nothing and returns null.
const CUtensorMap* launch_pointer_array(const PointerArray& list, int64_t groups, const CUtensorMap* map,
                                        void* stream);

}  // namespace transformer_plugin::gemm
