// Ops for tests of the kernels of a plan, in the library of virtual_ranks.cpp. virtual_plan launches each step of a plan for every
// rank before the next, or a whole plan of one rank.
#include <torch/library.h>

#include <algorithm>

#include "common/buffers.h"
#include "common/check.h"
#include "common/tensor.h"
#include "expert_parallel/one_sided/plan.h"
#include "expert_parallel/one_sided/virtual_ranks.h"

namespace transformer_plugin::expert_parallel::one_sided {
namespace {

using at::Tensor;
using at::TensorList;

static_assert(sizeof(PlanState) <= kStateWords * sizeof(int32_t));

constexpr const char* kPlanOp = "virtual_plan";

std::vector<int64_t> virtual_plan_layout(int64_t num_ranks, int64_t num_experts, int64_t received_rows,
                                         int64_t topk) {
  const PlanLayout layout = plan_layout(0, num_ranks, num_experts, received_rows, topk);
  return {layout.bytes, layout.flags[0], layout.flags[1], layout.flags[2]};
}

// Not the checks of compact_plan, which calls the same host code for one rank.
void check_plan(TensorList topk_idx, const Tensor& channel, const Tensor& state, int64_t max_tokens,
                const RecordPlanSizes& sizes) {
  const auto ranks = static_cast<int64_t>(topk_idx.size());
  TP_CHECK_VALUE(ranks >= 1 && ranks <= kMostPeers, kPlanOp, "topk_idx",
                 "from 1 to " << kMostPeers << " ranks", ranks, "Use fewer ranks");
  TP_CHECK_VALUE(sizes.experts >= ranks && sizes.experts % ranks == 0, kPlanOp, "num_experts",
                 "a multiple of the " << ranks << " ranks", sizes.experts,
                 "Give every rank the same number of experts");
  for (int64_t r = 0; r < ranks; ++r) {
    const std::string name_of_rank = entry("topk_idx", r);
    const Argument argument{kPlanOp, name_of_rank.c_str(), topk_idx[r]};
    check_dtype(argument, {at::kInt, at::kLong});
    check_dim(argument, 2);
    check_contiguous(argument);
    check_same_device(argument, {kPlanOp, "channel", channel});
    check_size(argument, 1, topk_idx[0].sym_size(1), "the columns of the first rank");
    TP_CHECK_VALUE(topk_idx[r].size(0) <= max_tokens, kPlanOp, "topk_idx", "at most max_tokens tokens",
                   describe(topk_idx[r]), "Pass a larger max_tokens");
  }
  const PlanLayout layout = plan_layout(0, ranks, sizes.experts, sizes.received_rows, topk_idx[0].size(1));
  const Argument of_channel{kPlanOp, "channel", channel}, of_state{kPlanOp, "state", state};
  check_dtype(of_channel, {at::kByte});
  check_contiguous(of_channel);
  check_size(of_channel, 0, ranks * layout.bytes, "the bytes of virtual_plan_layout for each rank");
  check_dtype(of_state, {at::kInt});
  check_dim(of_state, 2);
  check_size(of_state, 0, ranks, "the ranks");
  check_size(of_state, 1, kStateWords, "the words of the state of a rank");
  check_contiguous(of_state);
  check_same_device(of_state, of_channel);
}

// The plans of all ranks, eight tensors of each, in the order of CompactPlan.
std::vector<Tensor> virtual_plan(TensorList topk_idx, const Tensor& channel, const Tensor& state,
                                 int64_t num_experts, int64_t max_tokens, int64_t capacity, int64_t alignment,
                                 std::optional<int64_t> max_received_tokens, int64_t timeout_ms) {
  check_on_cuda(kPlanOp, channel);
  const auto ranks = static_cast<int64_t>(topk_idx.size());
  const int64_t tokens = ranks * max_tokens;
  const RecordPlanSizes sizes{
      kPlanOp,   num_experts,         capacity,
      alignment, max_received_tokens, std::min({tokens, capacity, max_received_tokens.value_or(tokens)}),
      false};
  check_plan(topk_idx, channel, state, max_tokens, sizes);
  std::vector<Tensor> plans;
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(channel);
  const PlanLayout layout = plan_layout(0, ranks, num_experts, sizes.received_rows, topk_idx[0].size(1));
  std::vector<PlanCall> calls;
  for (int64_t r = 0; r < ranks; ++r) {
    const PeerPointers peers = peers_of(channel, r, ranks, layout.bytes);
    auto* const of_rank = reinterpret_cast<PlanState*>(state.mutable_data_ptr<int32_t>() + r * kStateWords);
    calls.push_back(make_plan_call(topk_idx[r], max_tokens, sizes,
                                   {layout, peers, of_rank, timeout_ms * 1000000}, nullptr));
    if (r > 0) calls.back().args.range.word = nullptr;  // which all ranks of the process share
    const RecordPlan& plan = calls.back().plan;
    for (const Tensor& each : {plan.slot, plan.source, plan.tokens_per_expert, plan.required, plan.overflow,
                               plan.peer_rows, plan.records, plan.required_tokens})
      plans.push_back(each);
  }
  if (ranks == 1) {  // which waits for no other
    launch_plan(calls[0].args, PlanStep::kAll, scope.stream());
  } else {
    for (const PlanStep step : kPlanSteps) {
      for (const PlanCall& call : calls) launch_plan(call.args, step, scope.stream());
    }
  }
#endif
  mark_written(channel);
  mark_written(state);
  return plans;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_plugin_testing, m) {
  m.def("virtual_plan_layout(int num_ranks, int num_experts, int received_rows, int topk) -> int[]",
        &virtual_plan_layout);
  m.def(
      "virtual_plan(Tensor[] topk_idx, Tensor(a!) channel, Tensor(b!) state, int num_experts, int max_tokens, int capacity, "
      "int alignment, int? max_received_tokens, int timeout_ms=10000) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(transformer_plugin_testing, CPU, m) { m.impl("virtual_plan", &virtual_plan); }

#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin_testing, CUDA, m) { m.impl("virtual_plan", &virtual_plan); }
#endif

}  // namespace transformer_plugin::expert_parallel::one_sided
