// Slots on a CPU: counts the rows of each expert, then assigns slots in order (routing/slots_args.h).
#include <algorithm>
#include <vector>

#include "routing/slots_args.h"

namespace transformer_plugin::routing {
namespace {

// The index of the expert in the layout, or -1.
template <typename Index>
int64_t local_expert(Index index, int64_t first, int64_t experts) {
  const int64_t expert = static_cast<int64_t>(index);
  return expert >= first && expert - first < experts ? expert - first : -1;
}

template <typename Index>
void assign_slots(const AssignSlotsArgs& args) {
  const Index* indices = static_cast<const Index*>(args.indices);
  const int64_t items = args.tokens * args.topk;
  std::vector<int64_t> next(args.experts,
                            0);  // first the count of each expert, then the row of its next token
  for (int64_t i = 0; i < items; ++i) {
    const int64_t expert = local_expert(indices[i], args.first, args.experts);
    if (expert >= 0) ++next[expert];
  }
  int64_t start = 0;
  for (int64_t e = 0; e < args.experts; ++e) {
    const int64_t end = start + (next[e] + args.alignment - 1) / args.alignment * args.alignment;
    args.group_sizes[e] = std::min(end, args.capacity) - std::min(start, args.capacity);
    next[e] = start;
    start = end;
  }
  *args.total = start;
  std::fill_n(args.source, args.capacity, -1);
  if (args.source_k) std::fill_n(args.source_k, args.capacity, -1);
  if (args.probs) std::fill_n(args.probs, args.capacity, 0.0f);
  for (int64_t i = 0; i < items; ++i) {
    const int64_t expert = local_expert(indices[i], args.first, args.experts);
    const int64_t row = expert >= 0 ? next[expert]++ : args.capacity;
    args.slot[i] = row < args.capacity ? static_cast<int32_t>(row) : -1;
    if (row >= args.capacity) continue;
    args.source[row] = static_cast<int32_t>(i / args.topk);
    if (args.source_k) args.source_k[row] = static_cast<int32_t>(i % args.topk);
    if (args.probs) args.probs[row] = args.weights[i];
  }
}

template <typename Index>
void count_tokens(const CountTokensArgs& args) {
  std::fill_n(args.counts, args.experts, 0);
  for (int64_t i = 0; i < args.numel; ++i) {
    const int64_t expert = local_expert(static_cast<const Index*>(args.indices)[i], 0, args.experts);
    if (expert >= 0) ++args.counts[expert];
  }
}

}  // namespace

void assign_slots_cpu(const AssignSlotsArgs& args) {
  return args.indices_are_int64 ? assign_slots<int64_t>(args) : assign_slots<int32_t>(args);
}

void count_tokens_cpu(const CountTokensArgs& args) {
  return args.indices_are_int64 ? count_tokens<int64_t>(args) : count_tokens<int32_t>(args);
}

}  // namespace transformer_plugin::routing
