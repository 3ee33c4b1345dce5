// CPU kernel of the sum over ranks (SumRanksArgs).
#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "common/visit_float.h"
#include "distributed/sum_ranks_args.h"

namespace transformer_plugin::distributed {
namespace {

constexpr int64_t kElementsPerTask = 16384;

template <typename T, typename Out, typename Sum>
TP_CPU_CLONES void sum_row(const T* const* partials, int64_t first, int64_t ranks, Sum factor,
                           bool accumulate, Out* output, int64_t width) {
  constexpr int64_t kChunk = 512;
  Sum sums[kChunk];
  for (int64_t start = 0; start < width; start += kChunk) {
    const int64_t count = width - start < kChunk ? width - start : kChunk;
    for (int64_t h = 0; h < count; ++h) sums[h] = 0;
    for (int64_t r = 0; r < ranks; ++r) {
      const T* partial = partials[r] + first + start;
      for (int64_t h = 0; h < count; ++h) sums[h] = sums[h] + static_cast<Sum>(partial[h]);
    }
    for (int64_t h = 0; h < count; ++h) sums[h] = sums[h] * factor;
    if (accumulate) {
      for (int64_t h = 0; h < count; ++h) sums[h] = static_cast<Sum>(output[start + h]) + sums[h];
    }
    for (int64_t h = 0; h < count; ++h) output[start + h] = static_cast<Out>(sums[h]);
  }
}

template <typename T, typename Out, typename Sum>
void sum_rows(const SumRanksArgs& args) {
  std::vector<const T*> partials;
  for (int64_t r = 0; r < args.ranks; ++r) partials.push_back(args.partial<T>(r));
  const int64_t rows_per_task = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, args.width));
  at::parallel_for(0, args.rows, rows_per_task, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      sum_row<T, Out, Sum>(partials.data(), t * args.width, args.ranks, args.factor, args.accumulate,
                           static_cast<Out*>(args.output) + t * args.width, args.width);
    }
  });
}

}  // namespace

void sum_ranks_cpu(const SumRanksArgs& args) {
  if (args.dtype == DType::kFloat64) return sum_rows<double, double, double>(args);
  visit_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    if (args.out_dtype == DType::kFloat32) return sum_rows<T, float, float>(args);
    sum_rows<T, T, float>(args);
  });
}

}  // namespace transformer_plugin::distributed
