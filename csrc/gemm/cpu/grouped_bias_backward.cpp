#include "gemm/args/grouped_bias_backward.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "common/visit_float.h"

namespace transformer_plugin::gemm {
namespace {

constexpr int kColumnsAtOnce = 128;

constexpr int kBranch = 4;
constexpr float kOnes[kBranch] = {1.0f, 1.0f, 1.0f, 1.0f};

// The scaled sums of up to kBranch rows: one branch of the summation tree. The columns to the right are prefetched, because the
// hardware prefetcher does not follow rows that are far apart.
template <typename T>
TP_CPU_CLONES void sum_branch(const T* grad, int64_t stride, const float* scales, int64_t rows,
                              int64_t columns, float* __restrict sums) {
  constexpr int kLine = 64 / sizeof(T);
  for (int64_t r = 0; r < rows; ++r) {
    const T* right = grad + r * stride + kColumnsAtOnce;
    for (int c = 0; c < kColumnsAtOnce; c += kLine) __builtin_prefetch(right + c);
  }
  if (rows == kBranch) {
    const T *b = grad + stride, *c = b + stride, *d = c + stride;
    for (int64_t j = 0; j < columns; ++j) {
      sums[j] = (static_cast<float>(grad[j]) * scales[0] + static_cast<float>(b[j]) * scales[1]) +
                (static_cast<float>(c[j]) * scales[2] + static_cast<float>(d[j]) * scales[3]);
    }
    return;
  }
  for (int64_t j = 0; j < columns; ++j) sums[j] = static_cast<float>(grad[j]) * scales[0];
  for (int64_t r = 1; r < rows; ++r) {
    for (int64_t j = 0; j < columns; ++j) {
      sums[j] = sums[j] + static_cast<float>(grad[r * stride + j]) * scales[r];
    }
  }
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

// The partial sums of every tile.
template <typename T>
void sum_tiles(const GroupedBiasBackwardArgs& args) {
  const int64_t n = args.sums.columns, parts = (n + kColumnsAtOnce - 1) / kColumnsAtOnce;
  const int64_t slots = ColumnSums::slots(args.sums.rows, args.sums.groups);
  at::parallel_for(0, slots * parts, 1, [&](int64_t begin, int64_t end) {
    alignas(64) float sums[kSumRows / kBranch][kColumnsAtOnce];
    for (int64_t task = begin; task < end; ++task) {
      const RaggedTile tile = args.sums.tile(task / parts);
      if (tile.begin >= tile.end) continue;
      const int64_t column = task % parts * kColumnsAtOnce;
      const int64_t count = std::min<int64_t>(kColumnsAtOnce, n - column);
      int64_t branches = 0;
      for (int64_t i = tile.begin; i < tile.end; i += kBranch) {
        sum_branch<T>(static_cast<const T*>(args.grad) + i * n + column, n,
                      args.bias_scale ? args.bias_scale + i : kOnes, std::min<int64_t>(kBranch, tile.end - i),
                      count, sums[branches++]);
      }
      sum_rows_cpu(sums[0], kColumnsAtOnce, branches, count);
      std::copy_n(sums[0], count, args.sums.of_tile(tile.group, tile.begin) + column);
    }
  });
}

template <typename T>
void sum_rows(const GroupedBiasBackwardArgs& args) {
  const int64_t n = args.sums.columns, groups = args.sums.groups;
  at::parallel_for(0, args.sums.rows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t g = group_of_row(args.sums.offsets, groups, i);
      args.grad_bias_scale[i] =
          g < groups ? row_sum(static_cast<const T*>(args.grad) + i * n, args.bias + g * n, n) : 0.0f;
    }
  });
}

}  // namespace

void grouped_bias_backward_cpu(const GroupedBiasBackwardArgs& args) {
  visit_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    if (args.sums.groups > 0) sum_tiles<T>(args);
    add_tile_sums_cpu(args.sums);
    if (args.grad_bias_scale) sum_rows<T>(args);
  });
}

}  // namespace transformer_plugin::gemm
