// dispatch: all-gathers the tokens (and weights) of all ranks; each rank copies the rows of its own experts
// into their slots. The gradient of the tokens is combine; the gradient of a slot's weight goes back to its
// (token, k).
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "common/autograd.h"
#include "common/register.h"
#include "common/tensor.h"
#include "expert_parallel/exchange.h"
#include "routing/rows.h"
#include "routing/rows_args.h"

namespace transformer_plugin::expert_parallel {
namespace {

using at::Tensor;
using c10::SymInt;
using OptionalTensor = std::optional<Tensor>;
using Pair = std::tuple<Tensor, Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Pair dispatch_outputs(const Tensor& tokens, const OptionalTensor& topk_weights, const Tensor& slot,
                      const Tensor& source, int64_t timeout_ms) {
  constexpr const char* op = "dispatch";
  check_timeout(op, timeout_ms);
  const Argument tokens_argument{op, "tokens", tokens};
  check_dtype(tokens_argument, kPayloadTypes);
  check_dim(tokens_argument, 2);
  check_plan(op, slot, source, tokens);
  const at::ScalarType type = weight_type(tokens.scalar_type());
  if (topk_weights) {
    const Argument weights_argument{op, "topk_weights", *topk_weights};
    check_dtype(weights_argument, {type});
    check_dim(weights_argument, 2);
    check_same_device(weights_argument, tokens_argument);
    check_size(weights_argument, 0, tokens.sym_size(0), "the rows of 'tokens'");
    check_size(weights_argument, 1, slot.sym_size(1), "the columns of 'slot'");
  }
  return {empty(tokens, {source.sym_size(0), tokens.sym_size(1)}, tokens.scalar_type()),
          empty(tokens, {topk_weights ? source.sym_size(0) : SymInt(0)}, type)};
}

// Bits of `wanted`: the inputs whose gradients autograd will compute.
constexpr int64_t kTokensWanted = 1;
constexpr int64_t kWeightsWanted = 2;

Pair dispatch(const Tensor& tokens, const OptionalTensor& topk_weights, const Tensor& slot,
              const Tensor& source, std::string group_name, int64_t timeout_ms, int64_t wanted) {
  constexpr const char* op = "dispatch";
  auto [recv, recv_weights] = dispatch_outputs(tokens, topk_weights, slot, source, timeout_ms);
  ExpertParallelGroup group(op, group_name, timeout_ms, tokens);
  const int64_t max_tokens = tokens_per_rank(op, group, slot);
  const Tensor local = pad_rows({op, "tokens", tokens}, max_tokens);
  Tensor local_weights;
  if (topk_weights) local_weights = pad_rows({op, "topk_weights", *topk_weights}, max_tokens);
  wanted = std::max<int64_t>(0, wanted);
  group.begin_call(
      exchange_call(group, phases::kDispatchTokens, slot, "tokens", tokens.scalar_type(), tokens.size(1))
          .set(fields::kWeights, topk_weights.has_value(), "topk_weights")
          .set(fields::kRowsGradient, (wanted & kTokensWanted) != 0, "tokens")
          .set(fields::kWeightsGradient, (wanted & kWeightsWanted) != 0, "topk_weights")
          .set(fields::kTokens, tokens.size(0), "tokens"),
      topk_weights ? 2 : 1);
  PendingCollective rows = group.start_all_gather(local, phases::kDispatchTokens);
  PendingCollective weights;
  if (topk_weights) weights = group.start_all_gather(local_weights, phases::kDispatchWeights);
  const Tensor gathered = rows.wait();
  const Tensor gathered_weights = weights.wait();
  recv = routing::gather_rows(gathered, source, slot);
  if (topk_weights) recv_weights = routing::weights_to_slots(gathered_weights, slot, source);
  return {recv, recv_weights};
}

Pair dispatch_backward_outputs(const OptionalTensor& grad_recv, const OptionalTensor& grad_recv_weights,
                               const Tensor& slot, const SymInt& num_tokens, const SymInt& hidden_size,
                               at::ScalarType dtype, bool for_tokens, bool for_weights, int64_t timeout_ms) {
  constexpr const char* op = "dispatch_backward";
  check_timeout(op, timeout_ms);
  const Argument slot_argument{op, "slot", slot};
  check_dtype(slot_argument, {at::kInt});
  check_dim(slot_argument, 2);
  TP_CHECK_VALUE(slot.sym_size(1) <= routing::kMaxTopk, op, "slot",
                 "at most " << routing::kMaxTopk << " columns", describe(slot),
                 "Pass the slots that dispatch was given");
  check_count(op, "num_tokens", num_tokens, slot.sym_size(0), "Pass the rows that dispatch was given");
  check_count(op, "hidden_size", hidden_size, std::numeric_limits<int32_t>::max(),
              "Pass the columns that dispatch was given");
  TP_CHECK_TYPE(std::count(kPayloadTypes.begin(), kPayloadTypes.end(), dtype), op, "dtype",
                "one of the dtypes float32, bfloat16, float16, float64", dtype_name(dtype),
                "Pass the dtype of the tokens");
  const at::ScalarType type = weight_type(dtype);
  if (grad_recv) {
    const Argument argument{op, "grad_recv", *grad_recv};
    check_dtype(argument, {dtype});
    check_dim(argument, 2);
    check_size(argument, 1, hidden_size, "hidden_size");
    check_same_device(argument, slot_argument);
  }
  if (grad_recv_weights) {
    const Argument argument{op, "grad_recv_weights", *grad_recv_weights};
    check_dtype(argument, {type});
    check_dim(argument, 1);
    check_same_device(argument, slot_argument);
  }
  const SymInt none(0);
  return {empty(slot, {for_tokens ? num_tokens : none, for_tokens ? hidden_size : none}, dtype),
          empty(slot, {for_weights ? num_tokens : none, for_weights ? slot.sym_size(1) : none}, type)};
}

// An absent gradient counts as zero. The collectives still run, because other ranks may have gradients.
Pair dispatch_backward(const OptionalTensor& grad_recv, const OptionalTensor& grad_recv_weights,
                       const Tensor& slot, int64_t num_tokens, int64_t hidden_size, at::ScalarType dtype,
                       bool for_tokens, bool for_weights, std::string group_name, int64_t timeout_ms) {
  constexpr const char* op = "dispatch_backward";
  auto [grad_tokens, grad_weights] =
      dispatch_backward_outputs(grad_recv, grad_recv_weights, slot, num_tokens, hidden_size, dtype,
                                for_tokens, for_weights, timeout_ms);
  ExpertParallelGroup group(op, group_name, timeout_ms, slot);
  const int64_t max_tokens = tokens_per_rank(op, group, slot);
  TP_CHECK_VALUE(num_tokens >= 0 && num_tokens <= max_tokens, op, "num_tokens",
                 "from 0 to " << max_tokens << " (max_tokens of the plan)", num_tokens,
                 "Pass the rows that dispatch was given");
  const auto zeros = [&](int64_t width, at::ScalarType type) {
    return at::zeros({slot.size(0), width}, slot.options().dtype(type));
  };
  Tensor row_parts, weight_parts;
  if (for_tokens)
    row_parts = grad_recv ? routing::sum_slots(*grad_recv, slot, std::nullopt) : zeros(hidden_size, dtype);
  if (for_weights)
    weight_parts = grad_recv_weights ? routing::weights_from_slots(*grad_recv_weights, slot)
                                     : zeros(slot.size(1), weight_type(dtype));
  group.begin_call(exchange_call(group, phases::kDispatchBackwardRows, slot, "grad_recv", dtype, hidden_size)
                       .set(fields::kRowsGradient, for_tokens, "for_tokens")
                       .set(fields::kWeightsGradient, for_weights, "for_weights"),
                   int64_t{for_tokens} + int64_t{for_weights});
  PendingCollective rows, weights;
  if (for_tokens) rows = group.start_all_to_all(row_parts, phases::kDispatchBackwardRows);
  if (for_weights) weights = group.start_all_to_all(weight_parts, phases::kDispatchBackwardWeights);
  const Tensor received = rows.wait();
  const Tensor received_weights = weights.wait();
  if (for_tokens) grad_tokens = sum_ranks(received, group.size(), num_tokens);
  if (for_weights) grad_weights = sum_ranks(received_weights, group.size(), num_tokens);
  return {grad_tokens, grad_weights};
}

class DispatchFunction : public CheckedFunction<DispatchFunction> {
 public:
  static constexpr const char* kName = "dispatch";
  static constexpr bool is_traceable = true;

  static Pair call(const Tensor& tokens, const OptionalTensor& topk_weights, const Tensor& slot,
                   const Tensor& source, const std::string& group_name, int64_t timeout_ms, int64_t wanted) {
    using Signature = Pair(const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&, std::string,
                           int64_t, int64_t);
    static const auto op = find_op<Signature>("dispatch");
    return op.call(tokens, topk_weights, slot, source, group_name, timeout_ms, wanted);
  }

  static Pair call_backward(const OptionalTensor& grad_recv, const OptionalTensor& grad_recv_weights,
                            const Tensor& slot, const SymInt& num_tokens, const SymInt& hidden_size,
                            at::ScalarType dtype, bool for_tokens, bool for_weights,
                            const std::string& group_name, int64_t timeout_ms) {
    using Signature = Pair(const OptionalTensor&, const OptionalTensor&, const Tensor&, SymInt, SymInt,
                           at::ScalarType, bool, bool, std::string, int64_t);
    static const auto op = find_op<Signature>("dispatch_backward");
    return op.call(grad_recv, grad_recv_weights, slot, num_tokens, hidden_size, dtype, for_tokens,
                   for_weights, group_name, timeout_ms);
  }

  static variable_list forward(AutogradContext* ctx, const Tensor& tokens, const OptionalTensor& topk_weights,
                               const Tensor& slot, const Tensor& source, const std::string& group_name,
                               int64_t timeout_ms) {
    const bool for_weights = wants_grad(topk_weights);
    ctx->save_for_backward({slot});
    ctx->set_materialize_grads(false);
    ctx->saved_data["num_tokens"] = tokens.sym_size(0);
    ctx->saved_data["hidden_size"] = tokens.sym_size(1);
    ctx->saved_data["dtype"] = static_cast<int64_t>(tokens.scalar_type());
    ctx->saved_data["for_tokens"] = wants_grad(tokens);
    ctx->saved_data["for_weights"] = for_weights;
    ctx->saved_data["group_name"] = group_name;
    ctx->saved_data["timeout_ms"] = timeout_ms;
    const BelowAutograd guard;
    const int64_t wanted = (wants_grad(tokens) ? kTokensWanted : 0) + (for_weights ? kWeightsWanted : 0);
    const auto [recv, recv_weights] =
        call(tokens, topk_weights, slot, source, group_name, timeout_ms, wanted);
    variable_list constant;
    if (!wants_grad(tokens)) constant.push_back(recv);
    if (!for_weights) constant.push_back(recv_weights);
    ctx->mark_non_differentiable(constant);
    return {recv, recv_weights};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    auto& saved = ctx->saved_data;
    const bool for_tokens = saved["for_tokens"].toBool();
    const bool for_weights = saved["for_weights"].toBool();
    const auto [grad_tokens, grad_weights] = call_backward(
        for_tokens ? as_optional(grads[0]) : std::nullopt, for_weights ? as_optional(grads[1]) : std::nullopt,
        ctx->get_saved_variables()[0], saved["num_tokens"].toSymInt(), saved["hidden_size"].toSymInt(),
        static_cast<at::ScalarType>(saved["dtype"].toInt()), for_tokens, for_weights,
        saved["group_name"].toStringRef(), saved["timeout_ms"].toInt());
    return {for_tokens ? grad_tokens : Tensor(),
            for_weights ? grad_weights : Tensor(),
            Tensor(),
            Tensor(),
            Tensor(),
            Tensor()};
  }
};

Pair dispatch_autograd(const Tensor& tokens, const OptionalTensor& topk_weights, const Tensor& slot,
                       const Tensor& source, std::string group_name, int64_t timeout_ms, int64_t wanted) {
  if (any_wants_grad(tokens, topk_weights)) {
    const auto out = DispatchFunction::apply(tokens, topk_weights, slot, source, group_name, timeout_ms);
    return {out[0], out[1]};
  }
  const BelowAutograd guard;
  // In a compiled graph `wanted` holds the value from the time of tracing.
  return DispatchFunction::call(tokens, topk_weights, slot, source, group_name, timeout_ms, wanted);
}

Pair dispatch_backward_autograd(const OptionalTensor& grad_recv, const OptionalTensor& grad_recv_weights,
                                const Tensor& slot, SymInt num_tokens, SymInt hidden_size,
                                at::ScalarType dtype, bool for_tokens, bool for_weights,
                                std::string group_name, int64_t timeout_ms) {
  check_once_differentiable("dispatch_backward", grad_recv, grad_recv_weights);
  const BelowAutograd guard;
  return DispatchFunction::call_backward(grad_recv, grad_recv_weights, slot, num_tokens, hidden_size, dtype,
                                         for_tokens, for_weights, group_name, timeout_ms);
}

Pair dispatch_meta(const Tensor& tokens, const OptionalTensor& topk_weights, const Tensor& slot,
                   const Tensor& source, std::string, int64_t timeout_ms, int64_t) {
  return dispatch_outputs(tokens, topk_weights, slot, source, timeout_ms);
}

Pair dispatch_backward_meta(const OptionalTensor& grad_recv, const OptionalTensor& grad_recv_weights,
                            const Tensor& slot, SymInt num_tokens, SymInt hidden_size, at::ScalarType dtype,
                            bool for_tokens, bool for_weights, std::string, int64_t timeout_ms) {
  return dispatch_backward_outputs(grad_recv, grad_recv_weights, slot, num_tokens, hidden_size, dtype,
                                   for_tokens, for_weights, timeout_ms);
}

}  // namespace

TP_IMPL("dispatch", dispatch, dispatch_meta, dispatch_autograd);
TP_IMPL("dispatch_backward", dispatch_backward, dispatch_backward_meta, dispatch_backward_autograd);

}  // namespace transformer_plugin::expert_parallel
