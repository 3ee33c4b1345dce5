// How token rows move between the ranks of a group. The ops (ops/) check, assign slots, copy rows to them and sum them; a
// transport moves each token once to every rank that needs it, and brings back one sum of each rank. Another transport is a
// class here and a line in select_transport.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "expert_parallel/group.h"

namespace transformer_plugin::expert_parallel {

// The rows that a rank receives in one plan, each token once, in ascending order of (rank, token).
struct TokenLayout {
  int64_t max_tokens;     // of each rank
  int64_t received_rows;  // N
  // The two directions of the map between received rows and tokens. Both absent: row i is token i of all ranks, each with
  // max_tokens, so that N is R * max_tokens.
  // int32 [N]: the token of each row, counted rank * max_tokens + token, or -1 for a row of zeros; or, by records, `peer_rows`
  // [4, R + 1] (record_plan.h).
  std::optional<at::Tensor> received = std::nullopt;
  // int32 [R * max_tokens]: the row of each token, or -1; or `records` [3, max_tokens, min(K, R)].
  std::optional<at::Tensor> position = std::nullopt;

  bool is_by_records() const { return received && received->dim() == 2; }
};

// What moves with the tokens: their rows, or their routing weights.
struct Payload {
  at::Tensor rows;
  Phase phase;
  // The slots [N, K] of received rows in rows of the experts, [capacity, W]. A combine takes these: a received row is the sum of
  // those of its slots, in ascending order, rounded once. A dispatch returns these, each received row in all its slots.
  std::optional<at::Tensor> slot = std::nullopt;
  // Of a dispatch with slots, [capacity]: the received row of each row, or -1 for a row of zeros.
  std::optional<at::Tensor> source = std::nullopt;
  // Likewise: where the result is to be.
  std::optional<at::Tensor> out = std::nullopt;

  // Of a combine, [N, W].
  at::Tensor received_rows() const;
  // Of a dispatch: the result, from the received rows.
  at::Tensor result_of(const at::Tensor& received) const;
};

// What one call sends, and its description, which the ranks compare before.
struct TokenExchange {
  TokenLayout layout;
  Call call;
  std::vector<Payload> payloads;
};

class TokenTransport {
 public:
  virtual ~TokenTransport() = default;
  // For each payload, of which this rank's `rows` are [T, W], at most max_tokens: the received rows [N, W], or with slots those of
  // the experts. Records of tokens past T, and rows past those that were sent, are zeros.
  virtual std::vector<at::Tensor> dispatch(const TokenExchange& exchange) const = 0;
  // The reverse, of [N, W]: for each of this rank's first `tokens` tokens the sum of its rows on all ranks, [tokens, W]. Ranks are
  // added in ascending order in FP32 (FP64 of float64), from zero, and rounded once.
  virtual std::vector<at::Tensor> combine(const TokenExchange& exchange, int64_t tokens) const = 0;
};

// The transport for this group and the plan of this layout. It lives for one call.
std::unique_ptr<TokenTransport> make_transport(ExpertParallelGroup& group, const TokenLayout& layout);

}  // namespace transformer_plugin::expert_parallel
