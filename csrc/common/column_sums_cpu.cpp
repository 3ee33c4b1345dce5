// Column sums on a CPU (common/column_sums.h), vectorized over columns.
#include <ATen/Parallel.h>

#include <algorithm>

#include "common/column_sums.h"

namespace transformer_plugin {
namespace {

TP_CPU_CLONES void add_row(float* sum, const float* row, int64_t columns) {
  for (int64_t j = 0; j < columns; ++j) sum[j] = sum[j] + row[j];
}

TP_CPU_CLONES void without_negative_zero(const float* sum, float* target, int64_t columns) {
  for (int64_t j = 0; j < columns; ++j) target[j] = sum[j] + 0.0f;
}

constexpr int64_t kColumnsAtOnce = 512;

}  // namespace

void sum_rows_cpu(float* values, int64_t stride, int64_t rows, int64_t columns) {
  for (int64_t distance = 1; distance < rows; distance *= 2) {
    for (int64_t i = 0; i + distance < rows; i += 2 * distance) {
      add_row(values + i * stride, values + (i + distance) * stride, columns);
    }
  }
}

void add_tile_sums_cpu(const ColumnSums& sums) {
  const int64_t parts = (sums.columns + kColumnsAtOnce - 1) / kColumnsAtOnce;
  at::parallel_for(0, sums.groups * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t group = i / parts, column = i % parts * kColumnsAtOnce;
      const int64_t count = std::min(kColumnsAtOnce, sums.columns - column);
      float* target = sums.sums + group * sums.columns + column;
      if (sums.tiles(group) == 0) {
        std::fill_n(target, count, 0.0f);
        continue;
      }
      float* first = sums.of_group(group) + column;
      sum_rows_cpu(first, sums.columns, sums.tiles(group), count);
      without_negative_zero(first, target, count);
    }
  });
}

}  // namespace transformer_plugin
