#include "expert_parallel/all_gather_transport.h"

#include "distributed/sum_ranks.h"
#include "routing/rows.h"

namespace transformer_plugin::expert_parallel {

using at::Tensor;
using distributed::PendingCollective;

std::vector<Tensor> AllGatherTransport::dispatch(const TokenLayout& layout, const Call& call,
                                                 std::span<const Payload> payloads) const {
  group_.begin_call(call, static_cast<int64_t>(payloads.size()));
  std::vector<PendingCollective> pending;
  for (const Payload& payload : payloads)
    pending.push_back(group_.start_all_gather(payload.rows, payload.phase));
  std::vector<Tensor> received;
  for (PendingCollective& collective : pending) {
    const Tensor tokens = collective.wait();
    received.push_back(layout.received ? routing::gather_rows(tokens, *layout.received) : tokens);
  }
  return received;
}

std::vector<Tensor> AllGatherTransport::combine(const TokenLayout& layout, const Call& call,
                                                std::span<const Payload> payloads, int64_t tokens) const {
  std::vector<Tensor> sums;
  for (const Payload& payload : payloads)
    sums.push_back(layout.position ? routing::gather_rows(payload.rows, *layout.position) : payload.rows);
  group_.begin_call(call, static_cast<int64_t>(payloads.size()));
  std::vector<PendingCollective> pending;
  for (size_t i = 0; i < payloads.size(); ++i)
    pending.push_back(group_.start_all_to_all(sums[i], payloads[i].phase));
  sums.clear();
  for (PendingCollective& collective : pending) {
    const Tensor of_ranks = collective.wait();
    sums.push_back(group_.size() == 1 ? of_ranks.narrow(0, 0, tokens)
                                      : distributed::sum_ranks(of_ranks, group_.size(), tokens));
  }
  return sums;
}

}  // namespace transformer_plugin::expert_parallel
