// CPU kernels of plan: packing of the indices (PackIndicesArgs) and counting of rows (CountRowsArgs).
#include <algorithm>
#include <vector>

#include "expert_parallel/plan_args.h"

namespace transformer_plugin::expert_parallel {
namespace {

template <typename Index>
void pack(const PackIndicesArgs& args) {
  const Index* indices = static_cast<const Index*>(args.indices);
  const int64_t used = args.tokens * args.topk;
  for (int64_t i = 0; i < used; ++i) args.packed[i] = packed_index(static_cast<int64_t>(indices[i]));
  std::fill(args.packed + used, args.packed + args.max_tokens * args.topk, kNoExpert);
}

}  // namespace

void pack_indices_cpu(const PackIndicesArgs& args) {
  args.indices_are_int64 ? pack<int64_t>(args) : pack<int32_t>(args);
}

void count_rows_cpu(const CountRowsArgs& args) {
  std::vector<int64_t> counts(args.experts);
  for (int64_t i = 0; i < args.numel; ++i) {
    if (args.indices[i] >= 0 && args.indices[i] < args.experts) ++counts[args.indices[i]];
  }
  const int64_t local = args.experts / args.ranks;
  int64_t largest = 0;
  for (int64_t r = 0; r < args.ranks; ++r) {
    args.required[r] = 0;
    for (int64_t e = 0; e < local; ++e)
      args.required[r] += padded_rows(counts[r * local + e], args.alignment);
    largest = std::max(largest, args.required[r]);
  }
  *args.overflow = largest > args.capacity;
  if (args.report && *args.overflow) *args.report = largest;
}

}  // namespace transformer_plugin::expert_parallel
