// Rows gathered by an index, and sums of gathered rows, on a CPU (common/row_index_args.h).
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "common/row_index_args.h"
#include "common/visit_float.h"

namespace transformer_plugin {
namespace {

constexpr int64_t kElementsPerTask = 32768, kBytesPerTask = 65536;

template <typename Entry>
void copy_rows(const GatheredRows& rows, uint8_t* output) {
  const auto* entries = static_cast<const Entry*>(rows.index.entries);
  const auto* matrix = static_cast<const uint8_t*>(rows.matrix);
  const auto bytes = static_cast<size_t>(rows.row_bytes);
  const int64_t rows_per_task = std::max<int64_t>(1, kBytesPerTask / std::max<int64_t>(1, rows.row_bytes));
  at::parallel_for(0, *rows.index.end, rows_per_task, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      uint8_t* to = output + i * rows.row_bytes;
      if (entries[i] == kRowOfZeros) {
        std::memset(to, 0, bytes);
      } else {
        std::memcpy(to, matrix + entries[i] * rows.stride_bytes, bytes);
      }
    }
  });
}

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

void take_rows_cpu(const GatheredRows& rows, void* output) {
  if (rows.row_bytes == 0) return;
  auto* to = static_cast<uint8_t*>(output);
  rows.index.is_int64 ? copy_rows<int64_t>(rows, to) : copy_rows<int32_t>(rows, to);
}

void sum_taken_rows_cpu(const SumTakenRowsArgs& args) {
  if (args.dtype == DType::kFloat64) return sum_all_rows<double>(args);
  visit_float(args.dtype, [&](auto element) { sum_all_rows<decltype(element)>(args); });
}

}  // namespace transformer_plugin
