// The host's part of a plan by puts: the memory and the outputs of a call, for launch_plan() (plan_args.h). Nothing is read on the
// host, so that a CUDA graph can capture the call.
#pragma once

#include "expert_parallel/one_sided/plan_args.h"
#include "expert_parallel/record_plan.h"

namespace transformer_plugin::expert_parallel::one_sided {

// Where the ranks meet.
struct PlanChannel {
  PlanLayout layout;
  PeerPointers peers;
  PlanState* state;
  int64_t timeout_ns;  // of each wait
  distributed::WorkMarks marks = {};
  ChannelFailure* failure = nullptr;
};

struct PlanCall {
  PlanArgs args;
  RecordPlan plan;    // the outputs
  at::Tensor memory;  // of the call: must live until its kernels are launched
};

// `topk_idx`: int32 or int64 [..., K] of at most max_tokens tokens of this rank, contiguous, on a GPU. `report`: as in CountRowsArgs
// and ReportTokensArgs, or null. sizes.raise_on_overflow is not read. A wrong index of an earlier call is a ValueError.
PlanCall make_plan_call(const at::Tensor& topk_idx, int64_t max_tokens, const RecordPlanSizes& sizes,
                        const PlanChannel& channel, int64_t* report);

}  // namespace transformer_plugin::expert_parallel::one_sided
