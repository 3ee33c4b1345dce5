// Rows of a matrix gathered by an index, so that a GEMM can skip a permutation, and their gradient: for host
// files (common/row_index_args.h). On CUDA nothing is read on the host.
#pragma once

#include "common/check.h"
#include "common/row_index_args.h"

namespace transformer_plugin {

// int32 or int64 [T], contiguous, on the device of `matrix`, which has at most 2^31 - 1 rows.
void check_row_index(const Argument& index, const Argument& matrix);
// On a CPU an entry that is neither a row of the matrix nor kRowOfZeros is a ValueError; on a GPU the kernel
// reports it.
void check_row_entries(const Argument& index, const Argument& matrix, const at::Tensor& offsets);
// Raises a ValueError in the name of `op` if a kernel has reported a wrong entry since the last error. Does
// not synchronize.
void check_earlier_rows(const char* op);

// The kernel arguments for gathering rows. The rows of the matrix have inner stride 1.
GatheredRows rows_by_index(const at::Tensor& matrix, const at::Tensor& index, const at::Tensor& offsets);

// [T, K]: matrix[index[i]] for rows i of the groups; zeros for kRowOfZeros, and for a wrong entry on a GPU;
// the tail is undefined.
at::Tensor take_rows(const at::Tensor& matrix, const at::Tensor& index, const at::Tensor& offsets);

// [num_rows, K]: for each row of the matrix, the sum of the rows of `taken` that were gathered from it, in
// their order.
at::Tensor sum_taken_rows(const at::Tensor& taken, const at::Tensor& index, const at::Tensor& offsets,
                          int64_t num_rows);

}  // namespace transformer_plugin
