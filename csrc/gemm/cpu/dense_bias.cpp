#include <ATen/Parallel.h>

#include <algorithm>

#include "common/math.h"
#include "gemm/generic/dense_gemm.h"

namespace transformer_plugin::gemm {
namespace {

constexpr int64_t kElementsPerTask = 32768;

TP_CPU_CLONES void add_row(float* row, const float* bias, int64_t columns) {
  for (int64_t j = 0; j < columns; ++j) row[j] = row[j] + bias[j];
}

}  // namespace

void add_bias_cpu(float* matrix, const float* bias, int64_t rows, int64_t columns) {
  const int64_t rows_per_task = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, columns));
  at::parallel_for(0, rows, rows_per_task, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) add_row(matrix + i * columns, bias, columns);
  });
}

}  // namespace transformer_plugin::gemm
