#include "expert_parallel/all_to_all_transport.h"

#include <ATen/ops/zeros.h>

#include "expert_parallel/record_plan.h"
#include "routing/rows.h"

namespace transformer_plugin::expert_parallel {
namespace {

using at::Tensor;
using distributed::PendingCollective;

// How many rows this rank sends to each rank, and receives from it, in a dispatch.
struct RowCounts {
  std::vector<int64_t> sent, received;

  explicit RowCounts(const Tensor& peer_rows) {
    const Tensor host = peer_rows.cpu();
    const auto counts = [&](PeerRows row) {
      const int32_t* const first = host.const_data_ptr<int32_t>() + row * host.size(1);
      std::vector<int64_t> result;
      for (int64_t r = 0; r + 1 < host.size(1); ++r) result.push_back(first[r + 1] - first[r]);
      return result;
    };
    sent = counts(kSent);
    received = counts(kReceived);
  }
};

// [n, W] -> [rows, W], with zeros after them.
Tensor with_zero_rows(const Tensor& received, int64_t rows) {
  if (received.size(0) == rows) return received;
  const Tensor result = at::zeros({rows, received.size(1)}, received.options());
  result.narrow(0, 0, received.size(0)).copy_(received);
  return result;
}

}  // namespace

std::vector<Tensor> AllToAllTransport::dispatch(const TokenExchange& exchange) const {
  const TokenLayout& layout = exchange.layout;
  check_host_may_read(exchange.call.phase().op, "received", *layout.received);
  const RowCounts counts(*layout.received);
  const Tensor tokens = tokens_of_records(*layout.position).narrow(0, 0, distributed::sum_of(counts.sent));
  group_.begin_call(exchange.call, static_cast<int64_t>(exchange.payloads.size()));
  std::vector<PendingCollective> pending;
  for (const Payload& payload : exchange.payloads) {
    const Tensor rows = routing::gather_rows(payload.rows, tokens);
    pending.push_back(
        group_.collectives().all_to_all_rows(rows, counts.sent, counts.received, payload.phase));
  }
  std::vector<Tensor> result;
  for (size_t i = 0; i < pending.size(); ++i) {
    const Tensor received = with_zero_rows(pending[i].wait(), layout.received_rows);
    result.push_back(exchange.payloads[i].result_of(received));
  }
  return result;
}

std::vector<Tensor> AllToAllTransport::combine(const TokenExchange& exchange, int64_t tokens) const {
  const TokenLayout& layout = exchange.layout;
  check_host_may_read(exchange.call.phase().op, "received", *layout.received);
  const RowCounts counts(*layout.received);
  const int64_t received = distributed::sum_of(counts.received);
  group_.begin_call(exchange.call, static_cast<int64_t>(exchange.payloads.size()));
  std::vector<PendingCollective> pending;
  for (const Payload& payload : exchange.payloads) {
    pending.push_back(group_.collectives().all_to_all_rows(payload.received_rows().narrow(0, 0, received),
                                                           counts.received, counts.sent, payload.phase));
  }
  // The records of a token are in ascending order of ranks, so this is the sum over ranks, from zero, rounded once.
  const Tensor records = records_of_tokens(*layout.position).narrow(0, 0, tokens);
  std::vector<Tensor> sums;
  for (PendingCollective& collective : pending)
    sums.push_back(routing::sum_slots(collective.wait(), records, std::nullopt));
  return sums;
}

}  // namespace transformer_plugin::expert_parallel
