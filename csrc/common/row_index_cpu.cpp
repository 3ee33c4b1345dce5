// Sums of gathered rows on a CPU (common/row_index_args.h).
#include <ATen/Parallel.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "common/row_index_args.h"

namespace transformer_plugin {
namespace {

constexpr int64_t kElementsPerTask = 32768;

template <typename T>
void sum_rows(const SumTakenRowsArgs& args, int64_t begin, int64_t end) {
  using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const T* taken = static_cast<const T*>(args.taken);
  const int32_t* keys = args.sorted_keys;
  std::vector<Sum> sums(static_cast<size_t>(args.width));
  int64_t i = std::lower_bound(keys, keys + args.places, static_cast<int32_t>(begin)) - keys;
  for (int64_t row = begin; row < end; ++row) {
    std::fill(sums.begin(), sums.end(), Sum(0));
    for (; i < args.places && keys[i] == row; ++i) {
      const T* source = taken + args.order[i] * args.width;
      for (int64_t j = 0; j < args.width; ++j) sums[j] = sums[j] + static_cast<Sum>(source[j]);
    }
    T* output = static_cast<T*>(args.output) + row * args.width;
    for (int64_t j = 0; j < args.width; ++j) output[j] = static_cast<T>(sums[j]);
  }
}

template <typename T>
void sum_all_rows(const SumTakenRowsArgs& args) {
  const int64_t rows_per_task = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, args.width));
  at::parallel_for(0, args.rows, rows_per_task,
                   [&](int64_t begin, int64_t end) { sum_rows<T>(args, begin, end); });
}

}  // namespace

void sum_taken_rows_cpu(const SumTakenRowsArgs& args) {
  if (args.dtype == DType::kFloat64) return sum_all_rows<double>(args);
  visit_float(args.dtype, [&](auto element) { sum_all_rows<decltype(element)>(args); });
}

}  // namespace transformer_plugin
