#include "expert_parallel/one_sided/plan.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/expert_index.h"
#include "common/tensor.h"

namespace transformer_plugin::expert_parallel::one_sided {
namespace {

using at::Tensor;

// Whether the experts of a rank may need more rows than the capacity.
bool capacity_may_overflow(const PlanArgs& args) {
  const int64_t all = args.peers.ranks * args.max_tokens;
  const int64_t tokens = args.bound >= 0 ? std::min(all, args.bound) : all;
  return args.capacity < tokens * args.topk + args.local_experts() * (args.alignment - 1);
}

// The memory of the call, one part behind the other in one tensor.
Tensor allocate_memory(const Tensor& like, PlanArgs& args) {
  int64_t words = 0;
  std::vector<std::pair<int32_t**, int64_t>> parts;
  const auto take = [&](int32_t*& part, int64_t count) {
    parts.emplace_back(&part, words);
    words += round_up(count, 4);  // 16 bytes
  };
  const int64_t chunks = args.chunks(), ranks = args.peers.ranks;
  take(args.chunk_counts[0], chunks * args.chunk_stride());
  if (args.bound >= 0) take(args.chunk_counts[1], chunks * args.chunk_stride());
  take(args.first_slots, args.experts + 1);
  if (args.capacity_may_overflow) {
    take(args.own_slots, args.tokens * args.topk);
    take(args.kept_rows, chunks * ranks);
    take(args.received_places, ranks);
  }
  const Tensor memory = empty(like, {words}, at::kInt);
  for (const auto& [part, begin] : parts) *part = memory.mutable_data_ptr<int32_t>() + begin;
  return memory;
}

RecordPlan allocate_plan(const Tensor& like, PlanArgs& args) {
  const int64_t ranks = args.peers.ranks;
  RecordPlan plan;
  plan.slot = empty(like, {args.received_rows, args.topk}, at::kInt);
  plan.source = empty(like, {args.capacity}, at::kInt);
  plan.tokens_per_expert = empty(like, {args.local_experts()}, at::kLong);
  plan.required = empty(like, {ranks}, at::kLong);
  plan.overflow = empty(like, {1}, at::kInt);
  plan.peer_rows = empty(like, {4, ranks + 1}, at::kInt);
  plan.records = empty(like, {3, args.max_tokens, args.destinations()}, at::kInt);
  plan.required_tokens = empty(like, {ranks}, at::kLong);
  args.slot = plan.slot.mutable_data_ptr<int32_t>();
  args.source = plan.source.mutable_data_ptr<int32_t>();
  args.tokens_per_expert = plan.tokens_per_expert.mutable_data_ptr<int64_t>();
  args.required = plan.required.mutable_data_ptr<int64_t>();
  args.overflow = plan.overflow.mutable_data_ptr<int32_t>();
  args.peer_rows = plan.peer_rows.mutable_data_ptr<int32_t>();
  args.records = plan.records.mutable_data_ptr<int32_t>();
  args.required_tokens = plan.required_tokens.mutable_data_ptr<int64_t>();
  return plan;
}

}  // namespace

PlanCall make_plan_call(const Tensor& topk_idx, int64_t max_tokens, const RecordPlanSizes& sizes,
                        const PlanChannel& channel, int64_t* report) {
  PlanCall call{};
  PlanArgs& args = call.args;
  args.indices = topk_idx.const_data_ptr();
  args.indices_are_int64 = topk_idx.scalar_type() == at::kLong;
  args.topk = topk_idx.size(-1);
  args.tokens = topk_idx.numel() / args.topk;
  args.max_tokens = max_tokens;
  args.experts = sizes.experts;
  args.capacity = sizes.capacity;
  args.alignment = std::max<int64_t>(1, sizes.alignment);
  args.received_rows = sizes.received_rows;
  args.bound = sizes.bound.value_or(-1);
  args.range = check_expert_indices({sizes.op, "topk_idx", topk_idx}, sizes.experts);
  args.report = report;
  args.layout = channel.layout;
  args.peers = channel.peers;
  args.state = channel.state;
  args.timeout_ns = channel.timeout_ns;
  args.marks = channel.marks;
  args.failure = channel.failure;
  args.capacity_may_overflow = capacity_may_overflow(args);
  call.memory = allocate_memory(topk_idx, args);
  call.plan = allocate_plan(topk_idx, args);
  return call;
}

}  // namespace transformer_plugin::expert_parallel::one_sided
