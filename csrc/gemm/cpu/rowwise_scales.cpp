#include "gemm/args/rowwise_scales.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "common/ragged.h"
#include "common/visit_float.h"

namespace transformer_plugin::gemm {
namespace {

constexpr int64_t kWorth = 32768;  // elements for which a thread is worthwhile

// The factors that are the same along a row.
struct RowFactors {
  float scale, alpha, bias_scale;
};

template <typename Out>
TP_CPU_CLONES void scale_row(const float* sums, const float* b_scale, const float* bias, RowFactors factors,
                             int64_t n, Out* out) {
  if (!bias) {
    for (int64_t j = 0; j < n; ++j) {
      out[j] = static_cast<Out>(scaled_sum(sums[j], factors.scale, b_scale[j], factors.alpha));
    }
    return;
  }
  for (int64_t j = 0; j < n; ++j) {
    const float sum = scaled_sum(sums[j], factors.scale, b_scale[j], factors.alpha);
    out[j] = static_cast<Out>(fmaf(factors.bias_scale, bias[j], sum));
  }
}

template <typename Out>
void scale_rows(const RowwiseScaleArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t group = args.offsets ? group_of_row(args.offsets, args.groups, row) : 0;
    Out* out = static_cast<Out*>(args.out) + row * args.n;
    if (group == args.groups) {
      std::fill_n(out, args.n, Out(0.0f));
      continue;
    }
    const RowFactors factors{args.a_scale[row], args.alpha ? args.alpha[group] : 1.0f,
                             args.bias_scale ? args.bias_scale[row] : 1.0f};
    scale_row(args.sums + row * args.n, args.b_scale + group * args.n,
              args.bias ? args.bias + group * args.n : nullptr, factors, args.n, out);
  }
}

}  // namespace

void scale_rowwise_cpu(const RowwiseScaleArgs& args) {
  const int64_t grain = std::max<int64_t>(1, kWorth / std::max<int64_t>(1, args.n));
  visit_float(args.out_dtype, [&](auto type) {
    at::parallel_for(0, args.written_rows(), grain,
                     [&](int64_t begin, int64_t end) { scale_rows<decltype(type)>(args, begin, end); });
  });
}

}  // namespace transformer_plugin::gemm
