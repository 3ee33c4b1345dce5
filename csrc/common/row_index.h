// Rows of a matrix taken by an index, so that a product can skip a permute, and their gradient: the torch side of
// common/row_index_args.h, for host files. CPU or CUDA, by the device of the tensors; on CUDA nothing is read on the host.
#pragma once

#include "common/check.h"
#include "common/row_index_args.h"

namespace transformer_plugin {

// int32 or int64 [T], contiguous, on the device of `matrix`, which has at most 2^31 - 1 rows.
void check_row_index(const Argument& index, const Argument& matrix);
// On a CPU an entry outside of the matrix is a ValueError; on a GPU the kernel that follows it notices.
void check_row_entries(const Argument& index, const Argument& matrix, const at::Tensor& offsets);
// A ValueError in the name of `op` if a GPU noticed a wrong entry since the last one. Waits for nothing.
void check_earlier_rows(const char* op);

#ifdef TRANSFORMER_PLUGIN_CUDA
// What a kernel follows the index by. The rows of the matrix have inner stride 1.
TakenRows rows_by_index(const at::Tensor& matrix, const at::Tensor& index, const at::Tensor& offsets);
#endif

// [T, K]: matrix[index[i]] for the rows i of the groups, zeros where a GPU finds no such row; the tail is undefined.
at::Tensor take_rows(const at::Tensor& matrix, const at::Tensor& index, const at::Tensor& offsets);

// [num_rows, K]: the sum of the rows of `taken` over the places that a row was taken to, in their order.
at::Tensor sum_taken_rows(const at::Tensor& taken, const at::Tensor& index, const at::Tensor& offsets,
                          int64_t num_rows);

}  // namespace transformer_plugin
