// Tokens by all-to-all collectives of exactly the rows that ranks need, on Gloo and NCCL, for the plans of record_plan.h. The
// host reads how many they are, so that it cannot be captured in a CUDA graph.
#pragma once

#include "expert_parallel/transport.h"

namespace transformer_plugin::expert_parallel {

class AllToAllTransport : public TokenTransport {
 public:
  explicit AllToAllTransport(ExpertParallelGroup& group) : group_(group) {}
  std::vector<at::Tensor> dispatch(const TokenExchange& exchange) const override;
  std::vector<at::Tensor> combine(const TokenExchange& exchange, int64_t tokens) const override;

 private:
  ExpertParallelGroup& group_;
};

}  // namespace transformer_plugin::expert_parallel
