// The row tiles of a ragged matrix, which kernels find its groups by, and the layout that kernels use.
#pragma once

#include "common/check.h"
#include "quantize/ops/matrix_shape.h"

namespace transformer_plugin::quantize {

// The table of row tiles of a ragged matrix, on the device of the data. Undefined without groups.
struct GroupTables {
  at::Tensor storage;                    // int32: the table of RowTile, the strips, and the offsets
  int64_t groups = 0;                    // 1 if the table is merged
  const int32_t* offsets = nullptr;      // [groups + 1] in `storage`: first rows of groups
  const RowStrip* row_strips = nullptr;  // in `storage`, as in Layout
  bool with_tail = true;                 // as in RowTables

  // `offsets` as a tensor.
  at::Tensor offset_tensor() const;
};

// What the table must distinguish.
enum class GroupUse {
  kEach,  // the result depends on the group of a row: each group begins a row tile
  kAll,   // it does not: row tiles are those of one group that holds all rows of groups
};
// For row-wise data of this format, and for transposed data with or without it.
GroupUse group_use(const Format& format, bool transposed);

// Group sizes must be multiples of `multiple`; checked on CPU only. Without `zero_tail` the table has no row tiles of the
// tail, and kernels leave it out, unless other ops of the node share a table that has them.
GroupTables group_tables(const Argument& data, const at::Tensor* group_sizes, int64_t rows,
                         int64_t multiple = 1, GroupUse use = GroupUse::kEach, bool zero_tail = true);
// That multiple, for transposed data or for row-wise data only.
int64_t group_multiple(const Format& format, bool transposed);
// Checks the values of group sizes on a CPU, before anything is written; on a GPU, the errors that earlier
// calls reported.
void check_group_values(const Argument& data, const at::Tensor& group_sizes, int64_t multiple);
// The same for a buffer of `rows` rows, which transposed data does not determine.
void check_group_values_of(const Argument& data, int64_t rows, const at::Tensor& group_sizes,
                           int64_t multiple);

Layout make_layout(const MatrixShape& shape, const Format& format, const GroupTables& tables);

}  // namespace transformer_plugin::quantize
