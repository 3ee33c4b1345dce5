// The exchange of a layer whose experts are distributed over ranks: its node sends each token to the ranks of its experts and
// brings the sums back, by the ops dispatch and combine and their gradients. The rows of a received token are summed in combine.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <utility>

#include "linear/token_rows.h"

namespace transformer_plugin::linear {

// What has a gradient: the tokens, and the weights of their experts.
struct TokenGrads {
  bool tokens = false, weights = false;
};

struct RankExchange {
  bool over_ranks = false;
  std::string group_name = {};
  int64_t timeout_ms = -1;
  at::Tensor received = {}, position = {};  // of the plan, if it has these maps

  bool given() const { return over_ranks; }
  // `input`: the tokens, [T, H]. `probs`: the weights of their experts, [T, K]. `rows`: the maps of the plan.
  void check(const Argument& input, const Argument& probs, const TokenRows& rows) const;
  // A matrix of the sizes of the received tokens, for checks before there are any.
  static at::Tensor sized_as_received(const at::Tensor& tokens, const TokenRows& rows);

  // The received tokens [N, H], and the weight of each row of the experts, [capacity].
  std::pair<at::Tensor, at::Tensor> dispatch(const at::Tensor& tokens, const at::Tensor& weights,
                                             const TokenRows& rows, TokenGrads needed) const;
  // The sum of each token's rows on all ranks, of the experts' [capacity, H].
  at::Tensor combine(const at::Tensor& expert_rows, const TokenRows& rows, const c10::SymInt& num_tokens,
                     bool needs_grad) const;
  // The gradient of the sum of each received token, [N, H].
  at::Tensor combine_backward(const at::Tensor& grad, const TokenRows& rows) const;
};

// In the backward. Every rank sends the gradients that its forward recorded, zeros where it has none: others may have some.
struct SavedRankExchange : RankExchange {
  c10::SymInt num_tokens = 0;
  TokenGrads recorded = {};

  // All but the maps, which the node saves as tensors.
  void save(torch::autograd::AutogradContext* ctx) const;
  void restore(torch::autograd::AutogradContext* ctx);
  // The gradients of the tokens, in `out` if there is one, and of their weights. Of the experts' rows [capacity, H] and their
  // weights [capacity], or undefined. `sums_grad`: what combine_backward() returned.
  std::pair<at::Tensor, at::Tensor> dispatch_backward(const at::Tensor& grad_rows,
                                                      const at::Tensor& grad_weights,
                                                      const at::Tensor& sums_grad, const TokenRows& rows,
                                                      const std::optional<at::Tensor>& out) const;
};

}  // namespace transformer_plugin::linear
