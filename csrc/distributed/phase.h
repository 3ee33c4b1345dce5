// The points at which expert parallelism waits for other ranks, as its errors name them.
#pragma once

#include <cstdint>

namespace transformer_plugin::expert_parallel {

// Numbered because a CUDA kernel writes the number to host memory (watch_args.h).
enum class Phase : int32_t {
  kConfiguration,
  kPlanIndices,
  kDispatchTokens,
  kDispatchWeights,
  kDispatchBackwardRows,
  kDispatchBackwardWeights,
  kCombineRows,
  kCombineBackwardRows,
  kCount
};

struct PhaseName {
  const char* op;
  const char* phase;
};

constexpr PhaseName phase_name(Phase phase) {
  switch (phase) {
    case Phase::kConfiguration: return {"agree", "configuration"};
    case Phase::kPlanIndices: return {"plan", "indices"};
    case Phase::kDispatchTokens: return {"dispatch", "tokens"};
    case Phase::kDispatchWeights: return {"dispatch", "weights"};
    case Phase::kDispatchBackwardRows: return {"dispatch_backward", "rows"};
    case Phase::kDispatchBackwardWeights: return {"dispatch_backward", "weights"};
    case Phase::kCombineRows: return {"combine", "rows"};
    case Phase::kCombineBackwardRows: return {"combine_backward", "gradients"};
    default: return {"unknown op", "unknown phase"};
  }
}

}  // namespace transformer_plugin::expert_parallel
