#include "expert_parallel/all_gather_transport.h"

#include <ATen/ops/zeros.h>

#include "distributed/sum_ranks.h"
#include "routing/rows.h"

namespace transformer_plugin::expert_parallel {

using at::Tensor;
using distributed::PendingCollective;

namespace {

// [T, W] -> [max_tokens, W], padded with zero rows.
Tensor pad_rows(const Tensor& rows, int64_t max_tokens) {
  if (rows.size(0) == max_tokens) return rows.contiguous();
  const Tensor padded = at::zeros({max_tokens, rows.size(1)}, rows.options());
  padded.narrow(0, 0, rows.size(0)).copy_(rows);
  return padded;
}

}  // namespace

std::vector<Tensor> AllGatherTransport::dispatch(const TokenExchange& exchange) const {
  group_.begin_call(exchange.call, static_cast<int64_t>(exchange.payloads.size()));
  std::vector<PendingCollective> pending;
  for (const Payload& payload : exchange.payloads)
    pending.push_back(
        group_.collectives().all_gather(pad_rows(payload.rows, exchange.layout.max_tokens), payload.phase));
  const std::optional<Tensor>& received = exchange.layout.received;
  std::vector<Tensor> result;
  for (size_t i = 0; i < pending.size(); ++i) {
    const Tensor tokens = pending[i].wait();
    result.push_back(
        exchange.payloads[i].result_of(received ? routing::gather_rows(tokens, *received) : tokens));
  }
  return result;
}

std::vector<Tensor> AllGatherTransport::combine(const TokenExchange& exchange, int64_t tokens) const {
  const std::optional<Tensor>& position = exchange.layout.position;
  std::vector<Tensor> of_tokens;
  for (const Payload& payload : exchange.payloads)
    of_tokens.push_back(position ? routing::gather_rows(payload.received_rows(), *position)
                                 : payload.received_rows());
  group_.begin_call(exchange.call, static_cast<int64_t>(exchange.payloads.size()));
  std::vector<PendingCollective> pending;
  for (size_t i = 0; i < of_tokens.size(); ++i)
    pending.push_back(group_.collectives().all_to_all(of_tokens[i], exchange.payloads[i].phase));
  of_tokens.clear();
  std::vector<Tensor> sums;
  for (PendingCollective& collective : pending) {
    const Tensor of_ranks = collective.wait();
    sums.push_back(group_.size() == 1 ? of_ranks.narrow(0, 0, tokens)
                                      : distributed::sum_ranks(of_ranks, group_.size(), tokens));
  }
  return sums;
}

}  // namespace transformer_plugin::expert_parallel
