// FP32 sums over the rows of a matrix, or of each of its groups, in a written order, so that they repeat bit for bit and
// are the same on CPU and CUDA: neighbouring rows are added, then neighbouring sums, and so on until one is left; of an odd
// number the last goes up as it is. At last 0 is added, so that a sum of 0 has no sign. This is the order of every
// gradient of a bias.
//
// Kernels cut a group into tiles of 128 rows from its first row on. The sum of a tile is a whole branch of the tree, so
// tiles are summed first, in any order, and then their sums. A row that is not there may be added as 0: that changes
// nothing but the sign of a 0.
#pragma once

#include "common/ragged.h"

namespace transformer_plugin {

inline constexpr int kSumRows = 128;

struct ColumnSums {
  float* partial;          // scratch, [slots(rows, groups), columns]: the sums of each tile
  float* sums;             // [groups, columns]
  const int32_t* offsets;  // [groups + 1] rows where groups begin, or null: one group of all rows
  int64_t groups;
  int64_t rows;
  int64_t columns;

  TP_HOST_DEVICE static int64_t slots(int64_t rows, int64_t groups) {
    return tile_slots(rows, groups, kSumRows);
  }
  TP_HOST_DEVICE RaggedTile tile(int64_t slot) const {
    if (offsets) return ragged_tile(offsets, groups, slot, kSumRows);
    const int64_t begin = slot * kSumRows;
    return {0, begin, begin + kSumRows < rows ? begin + kSumRows : rows};
  }
  // Where the sums of the tile that begins at `row` lie.
  TP_HOST_DEVICE float* of_tile(int64_t group, int64_t row) const {
    return partial + (row / kSumRows + group) * columns;
  }
  // The tiles of a group.
  TP_HOST_DEVICE float* of_group(int64_t group) const {
    return partial + (offsets ? first_slot(offsets, group, kSumRows) : 0) * columns;
  }
  TP_HOST_DEVICE int64_t tiles(int64_t group) const {
    const int64_t of_group = offsets ? offsets[group + 1] - offsets[group] : rows;
    return (of_group + kSumRows - 1) / kSumRows;
  }
};

// The first of these rows becomes the sum of all; the others are left with sums of parts. Of at least one row.
void sum_rows_cpu(float* values, int64_t stride, int64_t rows, int64_t columns);
// From the sums of tiles, which are changed.
void add_tile_sums_cpu(const ColumnSums& sums);
void launch_add_tile_sums(const ColumnSums& sums, void* stream);

}  // namespace transformer_plugin
