// Tokens by stores into the memory of the ranks that need them, for the plans of record_plan.h, in an open channel of the group
// (one_sided/channel.h). On CUDA; the host reads nothing.
#pragma once

#ifdef TRANSFORMER_PLUGIN_CUDA
#include "expert_parallel/one_sided/channel.h"
#include "expert_parallel/transport.h"

namespace transformer_plugin::expert_parallel {

class OneSidedTransport : public TokenTransport {
 public:
  explicit OneSidedTransport(ExpertParallelGroup& group) : group_(group) {}
  std::vector<at::Tensor> dispatch(const TokenExchange& exchange) const override;
  std::vector<at::Tensor> combine(const TokenExchange& exchange, int64_t tokens) const override;

 private:
  one_sided::Exchange begin(const TokenExchange& exchange,
                            std::shared_ptr<const one_sided::Channel>& channel) const;

  ExpertParallelGroup& group_;
};

}  // namespace transformer_plugin::expert_parallel
#endif
