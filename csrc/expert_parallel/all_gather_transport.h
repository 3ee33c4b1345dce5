// Tokens by collectives: every rank receives all tokens of all ranks, and of them keeps the rows that its experts need, or all; the
// sums go back in equal parts, one row for each token of each rank. It takes any number of ranks, hosts and dtypes, on Gloo and
// NCCL.
#pragma once

#include "expert_parallel/transport.h"

namespace transformer_plugin::expert_parallel {

class AllGatherTransport : public TokenTransport {
 public:
  explicit AllGatherTransport(ExpertParallelGroup& group) : group_(group) {}
  std::vector<at::Tensor> dispatch(const TokenExchange& exchange) const override;
  std::vector<at::Tensor> combine(const TokenExchange& exchange, int64_t tokens) const override;

 private:
  ExpertParallelGroup& group_;
};

}  // namespace transformer_plugin::expert_parallel
