// dispatch: each token goes once to every rank that has an expert of it. What a rank receives are these rows, or, with `expand`,
// their copies in the slots of its experts; dispatch_out writes the copies to a buffer of the caller. The gradient of the tokens is
// combine; the gradient of a slot's weight goes back to its (token, k).
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "common/autograd.h"
#include "common/ops/expert_parallel.h"
#include "common/register.h"
#include "common/tensor.h"
#include "expert_parallel/ops/checks.h"
#include "routing/rows.h"
#include "routing/rows_args.h"

namespace transformer_plugin::expert_parallel {
namespace {

using at::Tensor;
using c10::SymInt;
using Pair = std::tuple<Tensor, Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char *kOp = "dispatch", *kOutOp = "dispatch_out";

Pair dispatch_outputs(const char* op, const Tensor& tokens, const OptionalTensor& topk_weights,
                      const ReceivedRows& plan, const Tensor& source, int64_t timeout_ms, bool expand) {
  check_timeout(op, timeout_ms);
  const Argument tokens_argument{op, "tokens", tokens};
  check_dtype(tokens_argument, kPayloadTypes);
  check_dim(tokens_argument, 2);
  check_plan(op, plan, source, tokens);
  const at::ScalarType type = weight_type(tokens.scalar_type());
  if (topk_weights) {
    const Argument weights_argument{op, "topk_weights", *topk_weights};
    check_dtype(weights_argument, {type});
    check_dim(weights_argument, 2);
    check_same_device(weights_argument, tokens_argument);
    check_size(weights_argument, 0, tokens.sym_size(0), "the rows of 'tokens'");
    check_size(weights_argument, 1, plan.slot.sym_size(1), "the columns of 'slot'");
  }
  const SymInt rows = expand ? source.sym_size(0) : plan.slot.sym_size(0);
  return {empty(tokens, {rows, tokens.sym_size(1)}, tokens.scalar_type()),
          empty(tokens, {topk_weights ? source.sym_size(0) : SymInt(0)}, type)};
}

// Bits of `grads_needed`: the inputs whose gradients autograd will compute.
constexpr int64_t kNeedsTokensGrad = 1;
constexpr int64_t kNeedsWeightsGrad = 2;

// The tokens, and with weights those. `rows`: where tokens go to.
TokenExchange exchange_of(const char* op, const ExpertParallelGroup& group, const Tensor& tokens,
                          const OptionalTensor& topk_weights, const ReceivedRows& plan, const Tensor& source,
                          int64_t grads_needed, const ExpertRows& rows) {
  const TokenLayout layout = layout_of(op, group, plan);
  std::vector<Payload> payloads{
      rows.payload(token_rows({op, "tokens", tokens}, layout.max_tokens), phases::kDispatchTokens)};
  if (topk_weights) {
    payloads.push_back(
        {token_rows({op, "topk_weights", *topk_weights}, layout.max_tokens), phases::kDispatchWeights});
  }
  grads_needed = std::max<int64_t>(0, grads_needed);
  check_source(op, group, plan.slot, source);
  const Call call =
      exchange_call(group, phases::kDispatchTokens, layout, plan.slot, "tokens", tokens.scalar_type(),
                    tokens.size(1))
          .set(fields::kWeights, topk_weights.has_value(), "topk_weights")
          .set(fields::kRowsGradient, (grads_needed & kNeedsTokensGrad) != 0, "tokens")
          .set(fields::kWeightsGradient, (grads_needed & kNeedsWeightsGrad) != 0, "topk_weights")
          .set(fields::kTokens, tokens.size(0), "tokens");
  return {layout, call, payloads};
}

Pair dispatch(const Tensor& tokens, const OptionalTensor& topk_weights, const Tensor& slot,
              const Tensor& source, std::string_view group_name, int64_t timeout_ms, int64_t grads_needed,
              bool expand, const OptionalTensor& received, const OptionalTensor& position) {
  const ReceivedRows plan{slot, received, position};
  auto [recv, recv_weights] = dispatch_outputs(kOp, tokens, topk_weights, plan, source, timeout_ms, expand);
  ExpertParallelGroup group(kOp, group_name, timeout_ms, tokens);
  const ExpertRows of_experts{expand, slot, source};
  const TokenExchange exchange =
      exchange_of(kOp, group, tokens, topk_weights, plan, source, grads_needed, of_experts);
  const std::vector<Tensor> rows = make_transport(group, exchange.layout)->dispatch(exchange);
  recv = not_aliased(rows[0], tokens);
  if (topk_weights) recv_weights = routing::weights_to_slots(rows[1], slot, source);
  return {recv, recv_weights};
}

void check_dispatch_out(const Tensor& tokens, const OptionalTensor& topk_weights, const ReceivedRows& plan,
                        const Tensor& source, const Tensor& recv, const OptionalTensor& recv_weights,
                        int64_t timeout_ms) {
  constexpr const char* op = kOutOp;
  constexpr const char* advice = "Call dispatch, which has a gradient";
  const auto [rows, weights] = dispatch_outputs(op, tokens, topk_weights, plan, source, timeout_ms, true);
  check_no_gradient({op, "tokens", tokens}, advice);
  if (topk_weights) check_no_gradient({op, "topk_weights", *topk_weights}, advice);
  TP_CHECK_VALUE(topk_weights.has_value() == recv_weights.has_value(), op, "recv_weights",
                 "a buffer where 'topk_weights' are given, and only there", (recv_weights ? "one" : "None"),
                 "Pass both or neither");
  check_buffer({op, "recv", recv}, rows);
  if (recv_weights) check_buffer({op, "recv_weights", *recv_weights}, weights);
}

void dispatch_out(const Tensor& tokens, const OptionalTensor& topk_weights, const Tensor& slot,
                  const Tensor& source, const Tensor& recv, const OptionalTensor& recv_weights,
                  std::string_view group_name, int64_t timeout_ms, int64_t grads_needed,
                  const OptionalTensor& received, const OptionalTensor& position) {
  const ReceivedRows plan{slot, received, position};
  check_dispatch_out(tokens, topk_weights, plan, source, recv, recv_weights, timeout_ms);
  check_apart(kOutOp, {{"recv", recv}, {"recv_weights", recv_weights}},
              {{"tokens", tokens},
               {"topk_weights", topk_weights},
               {"slot", slot},
               {"source", source},
               {"received", received},
               {"position", position}});
  ExpertParallelGroup group(kOutOp, group_name, timeout_ms, tokens);
  const ExpertRows of_experts{true, slot, source, recv};
  const TokenExchange exchange =
      exchange_of(kOutOp, group, tokens, topk_weights, plan, source, grads_needed, of_experts);
  const std::vector<Tensor> rows = make_transport(group, exchange.layout)->dispatch(exchange);
  mark_written(recv);
  if (!recv_weights) return;
  routing::weights_to_slots_out(rows[1], slot, source, *recv_weights);
  mark_written(*recv_weights);
}

Pair dispatch_backward_outputs(const OptionalTensor& grad_recv, const OptionalTensor& grad_recv_weights,
                               const ReceivedRows& plan, const SymInt& num_tokens, const SymInt& hidden_size,
                               at::ScalarType dtype, bool for_tokens, bool for_weights, int64_t timeout_ms,
                               bool expand) {
  constexpr const char* op = "dispatch_backward";
  check_timeout(op, timeout_ms);
  const Tensor& slot = plan.slot;
  check_received(op, plan, slot);
  const Argument slot_argument{op, "slot", slot};
  check_count(op, "num_tokens", num_tokens, plan.tokens(), "Pass the rows that dispatch was given");
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
    if (!expand) check_size(argument, 0, slot.sym_size(0), "the rows of 'slot'");
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

// An absent gradient counts as zero. The ranks still exchange, because others may have gradients.
Pair dispatch_backward(const OptionalTensor& grad_recv, const OptionalTensor& grad_recv_weights,
                       const Tensor& slot, int64_t num_tokens, int64_t hidden_size, at::ScalarType dtype,
                       bool for_tokens, bool for_weights, std::string_view group_name, int64_t timeout_ms,
                       bool expand, const OptionalTensor& received, const OptionalTensor& position) {
  constexpr const char* op = "dispatch_backward";
  const ReceivedRows plan{slot, received, position};
  auto [grad_tokens, grad_weights] =
      dispatch_backward_outputs(grad_recv, grad_recv_weights, plan, num_tokens, hidden_size, dtype,
                                for_tokens, for_weights, timeout_ms, expand);
  ExpertParallelGroup group(op, group_name, timeout_ms, slot);
  const TokenLayout layout = layout_of(op, group, plan);
  TP_CHECK_VALUE(num_tokens <= layout.max_tokens, op, "num_tokens",
                 "from 0 to " << layout.max_tokens << " (max_tokens of the plan)", num_tokens,
                 "Pass the rows that dispatch was given");
  const auto zeros = [&](int64_t width, at::ScalarType type) {
    return at::zeros({slot.size(0), width}, slot.options().dtype(type));
  };
  std::vector<Payload> payloads;
  if (for_tokens) {
    payloads.push_back({grad_recv ? *grad_recv : zeros(hidden_size, dtype), phases::kDispatchBackwardRows,
                        grad_recv && expand ? OptionalTensor(slot) : std::nullopt});
  }
  if (for_weights) {
    const Tensor rows = grad_recv_weights ? routing::weights_from_slots(*grad_recv_weights, slot)
                                          : zeros(slot.size(1), weight_type(dtype));
    payloads.push_back({rows, phases::kDispatchBackwardWeights});
  }
  const Call call =
      exchange_call(group, phases::kDispatchBackwardRows, layout, slot, "grad_recv", dtype, hidden_size)
          .set(fields::kRowsGradient, for_tokens, "for_tokens")
          .set(fields::kWeightsGradient, for_weights, "for_weights");
  const std::vector<Tensor> sums =
      make_transport(group, layout)->combine({layout, call, payloads}, num_tokens);
  if (for_tokens) grad_tokens = grad_recv ? not_aliased(sums.front(), *grad_recv) : sums.front();
  if (for_weights) grad_weights = sums.back();
  return {grad_tokens, grad_weights};
}

class DispatchFunction : public CheckedFunction<DispatchFunction> {
 public:
  static constexpr const char* kName = "dispatch";
  static constexpr bool is_traceable = true;

  static Pair call_backward(const OptionalTensor& grad_recv, const OptionalTensor& grad_recv_weights,
                            const Tensor& slot, const SymInt& num_tokens, const SymInt& hidden_size,
                            at::ScalarType dtype, bool for_tokens, bool for_weights,
                            std::string_view group_name, int64_t timeout_ms, bool expand,
                            const OptionalTensor& received, const OptionalTensor& position) {
    return ops::dispatch_backward(grad_recv, grad_recv_weights, slot, num_tokens, hidden_size, dtype,
                                  for_tokens, for_weights, group_name, timeout_ms, expand, received,
                                  position);
  }

  static variable_list forward(AutogradContext* ctx, const Tensor& tokens, const OptionalTensor& topk_weights,
                               const Tensor& slot, const Tensor& source, std::string_view group_name,
                               int64_t timeout_ms, bool expand, const OptionalTensor& received,
                               const OptionalTensor& position) {
    const bool for_weights = requires_grad(topk_weights);
    ctx->save_for_backward({slot, received.value_or(Tensor()), position.value_or(Tensor())});
    ctx->set_materialize_grads(false);
    ctx->saved_data["num_tokens"] = tokens.sym_size(0);
    ctx->saved_data["hidden_size"] = tokens.sym_size(1);
    ctx->saved_data["dtype"] = static_cast<int64_t>(tokens.scalar_type());
    ctx->saved_data["for_tokens"] = requires_grad(tokens);
    ctx->saved_data["for_weights"] = for_weights;
    ctx->saved_data["group_name"] = std::string(group_name);
    ctx->saved_data["timeout_ms"] = timeout_ms;
    ctx->saved_data["expand"] = expand;
    const BelowAutograd guard;
    const int64_t grads_needed =
        (requires_grad(tokens) ? kNeedsTokensGrad : 0) + (for_weights ? kNeedsWeightsGrad : 0);
    const auto [recv, recv_weights] = ops::dispatch(tokens, topk_weights, slot, source, group_name,
                                                    timeout_ms, grads_needed, expand, received, position);
    variable_list constant;
    if (!requires_grad(tokens)) constant.push_back(recv);
    if (!for_weights) constant.push_back(recv_weights);
    ctx->mark_non_differentiable(constant);
    return {recv, recv_weights};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    auto& saved = ctx->saved_data;
    const variable_list plan = ctx->get_saved_variables();
    const bool for_tokens = saved["for_tokens"].toBool();
    const bool for_weights = saved["for_weights"].toBool();
    const auto [grad_tokens, grad_weights] = call_backward(
        for_tokens ? as_optional(grads[0]) : std::nullopt, for_weights ? as_optional(grads[1]) : std::nullopt,
        plan[0], saved["num_tokens"].toSymInt(), saved["hidden_size"].toSymInt(),
        static_cast<at::ScalarType>(saved["dtype"].toInt()), for_tokens, for_weights,
        saved["group_name"].toStringRef(), saved["timeout_ms"].toInt(), saved["expand"].toBool(),
        as_optional(plan[1]), as_optional(plan[2]));
    variable_list result(9);
    if (for_tokens) result[0] = grad_tokens;
    if (for_weights) result[1] = grad_weights;
    return result;
  }
};

Pair dispatch_autograd(const Tensor& tokens, const OptionalTensor& topk_weights, const Tensor& slot,
                       const Tensor& source, std::string_view group_name, int64_t timeout_ms,
                       int64_t grads_needed, bool expand, const OptionalTensor& received,
                       const OptionalTensor& position) {
  if (any_requires_grad(tokens, topk_weights)) {
    const auto out = DispatchFunction::apply(tokens, topk_weights, slot, source, group_name, timeout_ms,
                                             expand, received, position);
    return {out[0], out[1]};
  }
  const BelowAutograd guard;
  // In a compiled graph `grads_needed` holds the value from the time of tracing.
  return ops::dispatch(tokens, topk_weights, slot, source, group_name, timeout_ms, grads_needed, expand,
                       received, position);
}

Pair dispatch_backward_autograd(const OptionalTensor& grad_recv, const OptionalTensor& grad_recv_weights,
                                const Tensor& slot, SymInt num_tokens, SymInt hidden_size,
                                at::ScalarType dtype, bool for_tokens, bool for_weights,
                                std::string_view group_name, int64_t timeout_ms, bool expand,
                                const OptionalTensor& received, const OptionalTensor& position) {
  check_once_differentiable("dispatch_backward", grad_recv, grad_recv_weights);
  const BelowAutograd guard;
  return DispatchFunction::call_backward(grad_recv, grad_recv_weights, slot, num_tokens, hidden_size, dtype,
                                         for_tokens, for_weights, group_name, timeout_ms, expand, received,
                                         position);
}

Pair dispatch_meta(const Tensor& tokens, const OptionalTensor& topk_weights, const Tensor& slot,
                   const Tensor& source, std::string_view, int64_t timeout_ms, int64_t, bool expand,
                   const OptionalTensor& received, const OptionalTensor& position) {
  return dispatch_outputs(kOp, tokens, topk_weights, {slot, received, position}, source, timeout_ms, expand);
}

Pair dispatch_backward_meta(const OptionalTensor& grad_recv, const OptionalTensor& grad_recv_weights,
                            const Tensor& slot, SymInt num_tokens, SymInt hidden_size, at::ScalarType dtype,
                            bool for_tokens, bool for_weights, std::string_view, int64_t timeout_ms,
                            bool expand, const OptionalTensor& received, const OptionalTensor& position) {
  return dispatch_backward_outputs(grad_recv, grad_recv_weights, {slot, received, position}, num_tokens,
                                   hidden_size, dtype, for_tokens, for_weights, timeout_ms, expand);
}

void dispatch_out_meta(const Tensor& tokens, const OptionalTensor& topk_weights, const Tensor& slot,
                       const Tensor& source, const Tensor& recv, const OptionalTensor& recv_weights,
                       std::string_view, int64_t timeout_ms, int64_t, const OptionalTensor& received,
                       const OptionalTensor& position) {
  check_dispatch_out(tokens, topk_weights, {slot, received, position}, source, recv, recv_weights,
                     timeout_ms);
}

}  // namespace

TP_IMPL_NO_GRADIENT(dispatch_out, dispatch_out, dispatch_out_meta);
TP_IMPL(dispatch, dispatch, dispatch_meta, dispatch_autograd);
TP_IMPL(dispatch_backward, dispatch_backward, dispatch_backward_meta, dispatch_backward_autograd);

}  // namespace transformer_plugin::expert_parallel
