// vocab_parallel_cross_entropy and its gradient on a CPU: rows in parallel, lanes vectorized.
#include <ATen/Parallel.h>

#include <algorithm>

#include "common/visit_float.h"
#include "tensor_parallel/vocab_parallel_cross_entropy.h"

namespace transformer_plugin::tensor_parallel {
namespace {

constexpr int64_t kElementsPerTask = 16384;
constexpr int kUnit = 8;
constexpr int kStep = kLanes * kUnit;  // columns of which each lane has a unit

int64_t rows_per_task(int64_t cols) {
  return std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, cols));
}

// The state of all lanes.
struct alignas(64) Lanes {
  float largest[kLanes];
  float sums[kLanes];
  float logits[kLanes];
};

// A unit of each lane, transposed: column i of lane t is at[i][t].
struct alignas(64) Units {
  float at[kUnit][kLanes];
};

// Columns past `count` are `missing`.
template <typename T>
TP_CPU_CLONES void read_units(const T* __restrict row, int64_t count, float missing, Units& units) {
  alignas(64) float values[kStep];
  for (int64_t c = 0; c < count; ++c) values[c] = static_cast<float>(row[c]);
  for (int64_t c = count; c < kStep; ++c) values[c] = missing;
  for (int t = 0; t < kLanes; ++t) {
    for (int i = 0; i < kUnit; ++i) units.at[i][t] = values[t * kUnit + i];
  }
}

// Of the 8 columns of each lane, neighbours first.
TP_CPU_CLONES void sum_units(const Units& __restrict units, float* __restrict sums) {
  const auto& e = units.at;
  for (int t = 0; t < kLanes; ++t) {
    sums[t] = ((e[0][t] + e[1][t]) + (e[2][t] + e[3][t])) + ((e[4][t] + e[5][t]) + (e[6][t] + e[7][t]));
  }
}

TP_CPU_CLONES void add_logits(const Units& units, Lanes& __restrict lanes) {
  alignas(64) float sums[kLanes];
  sum_units(units, sums);
  for (int t = 0; t < kLanes; ++t) lanes.logits[t] = lanes.logits[t] + sums[t];
}

// Overwrites the units.
TP_CPU_CLONES void add_exponentials(Units& __restrict units, Lanes& __restrict lanes) {
  alignas(64) float raised[kLanes], references[kLanes], sums[kLanes];
  for (int t = 0; t < kLanes; ++t) raised[t] = lanes.largest[t];
  for (int i = 0; i < kUnit; ++i) {
    for (int t = 0; t < kLanes; ++t) raised[t] = larger_f32(raised[t], units.at[i][t]);
  }
  for (int t = 0; t < kLanes; ++t) {
    lanes.sums[t] = lanes.sums[t] * rescale(lanes.largest[t], raised[t]);
    lanes.largest[t] = raised[t];
    references[t] = reference_of(raised[t]);
  }
  for (int i = 0; i < kUnit; ++i) {
    for (int t = 0; t < kLanes; ++t) units.at[i][t] = exp_of_difference(units.at[i][t], references[t]);
  }
  sum_units(units, sums);
  for (int t = 0; t < kLanes; ++t) lanes.sums[t] = lanes.sums[t] + sums[t];
}

// Of kLanes terms, neighbours first; overwrites them.
float sum_of_lanes(float* terms) {
  for (int count = kLanes; count > 1; count /= 2) {
    for (int i = 0; i < count / 2; ++i) terms[i] = terms[2 * i] + terms[2 * i + 1];
  }
  return terms[0];
}

RowPart add_lanes(Lanes& lanes) {
  float largest = negative_infinity();
  for (int t = 0; t < kLanes; ++t) largest = larger_f32(largest, lanes.largest[t]);
  for (int t = 0; t < kLanes; ++t) lanes.sums[t] = scaled_sum(lanes.largest[t], lanes.sums[t], largest);
  return {largest, sum_of_lanes(lanes.sums), 0.0f, sum_of_lanes(lanes.logits)};
}

template <typename T>
RowPart part_of_row(const RowPartArgs& args, int64_t index) {
  const CrossEntropyLogits& logits = args.logits;
  const int64_t target = args.targets.at(index);
  if (target == args.targets.ignore_index) return no_part();
  const T* row = static_cast<const T*>(logits.data) + index * logits.stride;
  Lanes lanes;
  std::fill_n(lanes.largest, kLanes, negative_infinity());
  std::fill_n(lanes.sums, kLanes, 0.0f);
  std::fill_n(lanes.logits, kLanes, 0.0f);
  Units units;
  for (int64_t c = 0; c < logits.cols; c += kStep) {
    const int64_t count = std::min<int64_t>(kStep, logits.cols - c);
    if (args.part_width == kPartWidth) {
      read_units<T>(row + c, count, 0.0f, units);
      add_logits(units, lanes);
    }
    read_units<T>(row + c, count, negative_infinity(), units);
    add_exponentials(units, lanes);
  }
  RowPart part = add_lanes(lanes);
  if (logits.has(target)) part.target = static_cast<float>(row[target - logits.first]);
  return part;
}

template <typename T>
TP_CPU_CLONES void write_gradient(const T* __restrict x, const RowGradient& gradient, T* __restrict target,
                                  int64_t cols) {
  const RowGradient of_row = gradient;
  for (int64_t c = 0; c < cols; ++c) target[c] = static_cast<T>(of_row.at(static_cast<float>(x[c])));
}

template <typename T>
void gradient_of_row(const CrossEntropyBackwardArgs& args, int64_t index) {
  const CrossEntropyLogits& logits = args.logits;
  const T* row = static_cast<const T*>(logits.data) + index * logits.stride;
  T* to = static_cast<T*>(args.grad_logits) + index * logits.stride;
  const int64_t target = args.targets.at(index);
  if (target == args.targets.ignore_index) {
    std::fill_n(to, logits.stride, T(0.0f));
    return;
  }
  const RowGradient gradient = row_gradient(args, index, target);
  write_gradient<T>(row, gradient, to, logits.cols);
  std::fill_n(to + logits.cols, logits.stride - logits.cols, T(0.0f));
  if (!logits.has(target)) return;
  const int64_t hit = target - logits.first;
  to[hit] = static_cast<T>(gradient.at(static_cast<float>(row[hit])) - gradient.target);
}

}  // namespace

std::optional<int64_t> wrong_target_cpu(const CrossEntropyTargets& targets, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t target = targets.at(row);
    if (target != targets.ignore_index && !targets.contains(target)) return target;
  }
  return std::nullopt;
}

void row_parts_cpu(const RowPartArgs& args) {
  visit_float(args.logits.dtype, [&](auto element) {
    using T = decltype(element);
    at::parallel_for(0, args.logits.rows, rows_per_task(args.logits.cols), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) store_part(args, row, part_of_row<T>(args, row));
    });
  });
}

void combine_cpu(const CombineArgs& args) {
  at::parallel_for(0, args.rows, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) combine_row(args, row);
  });
}

void cross_entropy_backward_cpu(const CrossEntropyBackwardArgs& args) {
  visit_float(args.logits.dtype, [&](auto element) {
    using T = decltype(element);
    at::parallel_for(0, args.logits.rows, rows_per_task(args.logits.stride), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) gradient_of_row<T>(args, row);
    });
  });
}

}  // namespace transformer_plugin::tensor_parallel
