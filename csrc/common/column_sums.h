// FP32 sums over the rows of a matrix, or of each of its groups, in a fixed order, so that they are
// deterministic and the same on CPU and CUDA: neighbouring rows are added, then neighbouring sums, and so on
// until one is left; of an odd number the last one moves up unchanged. Finally 0 is added, so that a zero sum
// is +0. Gradients of biases use this order.
//
// Kernels split a group into tiles of 128 rows, counted from its first row. The sum of a tile is a whole
// branch of the tree, so tiles are summed first, in any order, and then their sums. A missing row may be
// added as 0, which changes only the sign of a zero.
#pragma once

#include "common/ragged.h"

namespace transformer_plugin {

inline constexpr int kSumRows = 128;

struct ColumnSums {
  float* partial;          // scratch, [slots(rows, groups), columns]: the sums of each tile
  float* sums;             // [groups, columns]
  const int32_t* offsets;  // [groups + 1] first rows of groups, or null: one group of all rows
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
  // The sums of the tile that begins at `row`.
  TP_HOST_DEVICE float* of_tile(int64_t group, int64_t row) const {
    return partial + (row / kSumRows + group) * columns;
  }
  // The sums of a group's tiles.
  TP_HOST_DEVICE float* of_group(int64_t group) const {
    return partial + (offsets ? first_slot(offsets, group, kSumRows) : 0) * columns;
  }
  TP_HOST_DEVICE int64_t tiles(int64_t group) const {
    const int64_t of_group = offsets ? offsets[group + 1] - offsets[group] : rows;
    return (of_group + kSumRows - 1) / kSumRows;
  }
};

// Sums the rows into the first one; the others are overwritten. At least one row.
void sum_rows_cpu(float* values, int64_t stride, int64_t rows, int64_t columns);
// Adds the sums of tiles, which are overwritten.
void add_tile_sums_cpu(const ColumnSums& sums);
void launch_add_tile_sums(const ColumnSums& sums, void* stream);

}  // namespace transformer_plugin
