#include "linear/rank_exchange.h"

#include <optional>

#include "common/autograd.h"
#include "common/ops/expert_parallel.h"
#include "common/tensor.h"
#include "expert_parallel/ops/checks.h"

namespace transformer_plugin::linear {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;

constexpr const char* kGroupName = "group_name";

// Without `over_ranks` the other arguments would have no effect.
void check_not_given(const char* op, const RankExchange& ranks) {
  const char* name = ranks.received.defined()    ? "received"
                     : ranks.position.defined()  ? "position"
                     : !ranks.group_name.empty() ? "group_name"
                     : ranks.timeout_ms != -1    ? "timeout_ms"
                                                 : nullptr;
  TP_CHECK_VALUE(!name, op, name, "its default without 'over_ranks'", "another value",
                 "Pass over_ranks=True, with the maps of a plan");
}

}  // namespace

void RankExchange::check(const Argument& input, const Argument& probs, const TokenRows& rows) const {
  const char* op = input.op;
  if (!over_ranks) return check_not_given(op, *this);
  TP_CHECK_VALUE(rows.given(), op, "slot", "the map of a plan, with 'over_ranks'", "None",
                 "Pass 'slot' and 'source' of a plan");
  const std::optional<Tensor> of_received = as_optional(received), of_position = as_optional(position);
  const expert_parallel::ReceivedRows plan{rows.slot, of_received, of_position};
  expert_parallel::check_plan(op, plan, rows.source, input.tensor);
  expert_parallel::check_timeout(op, timeout_ms);
  expert_parallel::check_count(op, input.name, input.tensor.sym_size(0), plan.tokens(),
                               "Make the plan with a larger max_tokens on every rank");
  check_dtype(probs, {at::kFloat});
  check_dim(probs, 2);
  check_same_device(probs, input);
  check_size(probs, 0, input.tensor.sym_size(0), "the rows of 'input'");
  check_size(probs, 1, rows.slot.sym_size(1), "the columns of 'slot'");
}

Tensor RankExchange::sized_as_received(const Tensor& tokens, const TokenRows& rows) {
  const c10::SymInt columns = tokens.sym_size(1);
  return tokens.new_empty_symint({1, columns}).expand_symint({rows.slot.sym_size(0), columns});
}

std::pair<Tensor, Tensor> RankExchange::dispatch(const Tensor& tokens, const Tensor& weights,
                                                 const TokenRows& rows, TokenGrads needed) const {
  // As dispatch_autograd has it: a bit for each.
  const int64_t grads_needed = (needed.tokens ? 1 : 0) + (needed.weights ? 2 : 0);
  auto [recv, recv_weights] =
      ops::dispatch(tokens, weights, rows.slot, rows.source, group_name, timeout_ms, grads_needed,
                    /*expand=*/false, as_optional(received), as_optional(position));
  return {std::move(recv), std::move(recv_weights)};
}

Tensor RankExchange::combine(const Tensor& expert_rows, const TokenRows& rows, const c10::SymInt& num_tokens,
                             bool needs_grad) const {
  return ops::combine(expert_rows, rows.slot, rows.source, num_tokens, group_name, timeout_ms, needs_grad,
                      /*expand=*/true, as_optional(received), as_optional(position));
}

Tensor RankExchange::combine_backward(const Tensor& grad, const TokenRows& rows) const {
  return ops::combine_backward(grad, rows.slot, rows.source, group_name, timeout_ms, /*expand=*/false,
                               as_optional(received), as_optional(position));
}

void SavedRankExchange::save(AutogradContext* ctx) const {
  if (!given()) return;
  ctx->saved_data[kGroupName] = group_name;
  ctx->saved_data["timeout_ms"] = timeout_ms;
  ctx->saved_data["num_tokens"] = num_tokens;
  ctx->saved_data["for_tokens"] = recorded.tokens;
  ctx->saved_data["for_weights"] = recorded.weights;
}

void SavedRankExchange::restore(AutogradContext* ctx) {
  auto& saved = ctx->saved_data;
  over_ranks = saved.find(kGroupName) != saved.end();
  if (!given()) return;
  group_name = saved[kGroupName].toStringRef();
  timeout_ms = saved["timeout_ms"].toInt();
  num_tokens = saved["num_tokens"].toSymInt();
  recorded = {saved["for_tokens"].toBool(), saved["for_weights"].toBool()};
}

std::pair<Tensor, Tensor> SavedRankExchange::dispatch_backward(const Tensor& grad_rows,
                                                               const Tensor& grad_weights,
                                                               const Tensor& sums_grad, const TokenRows& rows,
                                                               const std::optional<Tensor>& out) const {
  const auto [grad_tokens, grad_topk_weights] = ops::dispatch_backward(
      as_optional(grad_rows), as_optional(grad_weights), rows.slot, num_tokens, sums_grad.sym_size(1),
      sums_grad.scalar_type(), recorded.tokens, recorded.weights, group_name, timeout_ms, /*expand=*/true,
      as_optional(received), as_optional(position));
  return {recorded.tokens ? written_to(grad_tokens, out) : Tensor(),
          recorded.weights ? grad_topk_weights : Tensor()};
}

}  // namespace transformer_plugin::linear
