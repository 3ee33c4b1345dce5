// The sum of what the ranks of a group have sent to this one.
#pragma once

#include <ATen/core/Tensor.h>

namespace transformer_plugin::distributed {

// [ranks * n, W], the partials of `ranks` ranks with n rows each -> [rows, W], the sum of their first `rows` rows in ascending
// order of ranks. The order is fixed, so a CPU and a GPU have the same bits.
at::Tensor sum_ranks(const at::Tensor& received, int64_t ranks, int64_t rows);
// The same for all rows, times `factor`, into a contiguous buffer of the dtype of `received` or of float32. `accumulate`: it is
// added to what the buffer holds.
void sum_ranks_out(const at::Tensor& received, int64_t ranks, const at::Tensor& out, bool accumulate,
                   double factor = 1);
// The same with the partial sum of rank `own_rank` elsewhere, [n, W]; `received` has those of the others.
void sum_ranks_out(const at::Tensor& received, const at::Tensor& own, int64_t own_rank, int64_t ranks,
                   const at::Tensor& out, bool accumulate, double factor);

}  // namespace transformer_plugin::distributed
