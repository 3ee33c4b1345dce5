// Launches of the kernels of a plan by records (plan_kernels.cuh).
#include <algorithm>
#include <stdexcept>

#include "expert_parallel/one_sided/plan_few_tokens.cuh"

namespace transformer_plugin::expert_parallel::one_sided {
namespace {

// few_tokens_kernel has the most; more would have to be asked for.
static_assert(sizeof(Chunk) + sizeof(TokenCounts) + sizeof(ExpertScan) + sizeof(ReceiveMemory) +
                      (plan_columns(kMostExperts, kMostPeers) + 3 + kMostPeers) * sizeof(int32_t) <=
                  48 * 1024,
              "the shared memory that every block may have");

template <typename Index>
void launch(const PlanArgs& args, PlanStep step, cudaStream_t stream) {
  const dim3 chunks(static_cast<unsigned>(args.chunks()));
  const size_t counters = static_cast<size_t>(args.chunk_stride()) * sizeof(int32_t);
  switch (step) {
    case PlanStep::kCount:
      launch_pdl(count_kernel<Index, false>, chunks, kPlanThreads, count_kernel_bytes(args), stream, args);
      break;
    case PlanStep::kCountKept:
      if (args.bound >= 0)
        launch_pdl(count_kernel<Index, true>, chunks, kPlanThreads, count_kernel_bytes(args), stream, args);
      break;
    case PlanStep::kAssign:
      launch_pdl(assign_kernel<Index>, chunks, kPlanThreads, counters, stream, args);
      break;
    case PlanStep::kNumber:
      if (args.capacity_may_overflow) launch_pdl(number_kernel<Index>, chunks, kPlanThreads, 0, stream, args);
      break;
    case PlanStep::kReceive: {
      constexpr unsigned kMostBlocks = 256;
      const unsigned grid = grid_size(args.received_rows * args.topk, kPlanThreads);
      launch_pdl(receive_kernel, dim3(std::min(grid, kMostBlocks)), kPlanThreads, 0, stream, args);
      break;
    }
    case PlanStep::kAll:
      if (!args.is_of_one_block()) {
        for (const PlanStep each : kPlanSteps) launch<Index>(args, each, stream);
        return;
      }
      launch_pdl(few_tokens_kernel<Index>, dim3(1), kPlanThreads, counters, stream, args);
  }
  check_launch("a kernel of the plan");
}

}  // namespace

void launch_plan(const PlanArgs& args, PlanStep step, void* stream) {
  if (args.experts > kMostExperts || args.peers.ranks > kMostPeers || args.topk > kMostPairs)
    throw std::invalid_argument(
        "transformer_plugin: a one-sided plan has at most 4096 experts, 72 ranks and 1024 indices a token");
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  args.indices_are_int64 ? launch<int64_t>(args, step, cuda_stream)
                         : launch<int32_t>(args, step, cuda_stream);
}

}  // namespace transformer_plugin::expert_parallel::one_sided
