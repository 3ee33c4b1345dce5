#include <ATen/Parallel.h>

#include <algorithm>

#include "gemm/grouped_bias_backward.h"
#include "gemm/ragged.h"

namespace transformer_plugin::gemm {
namespace {

template <typename T>
TP_CPU_CLONES void add_row(const T* grad, float scale, float* sum, int64_t columns) {
  for (int64_t j = 0; j < columns; ++j) sum[j] = sum[j] + static_cast<float>(grad[j]) * scale;
}

TP_CPU_CLONES void add_partial(const float* partial, float* sum, int64_t columns) {
  for (int64_t j = 0; j < columns; ++j) sum[j] = sum[j] + partial[j];
}

template <typename T>
TP_CPU_CLONES float row_sum(const T* grad, const float* bias, int64_t columns) {
  float lanes[kLanes] = {};
  for (int64_t start = 0; start < columns; start += kLanes) {
    const int64_t count = columns - start < kLanes ? columns - start : kLanes;
    for (int64_t l = 0; l < count; ++l) {
      lanes[l] = lanes[l] + static_cast<float>(grad[start + l]) * bias[start + l];
    }
  }
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
  }
  return lanes[0];
}

template <typename T>
void sum_chunks(const GroupedBiasBackwardArgs& args) {
  const int64_t n = args.columns;
  at::parallel_for(0, tile_slots(args.rows, args.groups, kChunkRows), 1, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      const RowTile chunk = row_tile(args.offsets, args.groups, slot, kChunkRows);
      float* sum = args.partial + slot * n;
      std::fill_n(sum, n, 0.0f);
      for (int64_t i = chunk.begin; i < chunk.end; ++i) {
        add_row(static_cast<const T*>(args.grad) + i * n, args.bias_scale ? args.bias_scale[i] : 1.0f, sum,
                n);
      }
    }
  });
  at::parallel_for(0, args.groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      const int64_t rows = args.offsets[g + 1] - args.offsets[g];
      const float* partial = args.partial + first_slot(args.offsets, g, kChunkRows) * n;
      float* sum = args.grad_bias + g * n;
      std::fill_n(sum, n, 0.0f);
      for (int64_t c = 0; c * kChunkRows < rows; ++c) add_partial(partial + c * n, sum, n);
    }
  });
}

template <typename T>
void sum_rows(const GroupedBiasBackwardArgs& args) {
  const int64_t n = args.columns;
  at::parallel_for(0, args.rows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t g = group_of_row(args.offsets, args.groups, i);
      args.grad_bias_scale[i] =
          g < args.groups ? row_sum(static_cast<const T*>(args.grad) + i * n, args.bias + g * n, n) : 0.0f;
    }
  });
}

}  // namespace

void grouped_bias_backward_cpu(const GroupedBiasBackwardArgs& args) {
  visit_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    if (args.groups > 0) sum_chunks<T>(args);
    if (args.grad_bias_scale) sum_rows<T>(args);
  });
}

}  // namespace transformer_plugin::gemm
