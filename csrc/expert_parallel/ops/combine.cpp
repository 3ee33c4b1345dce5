// combine: sums the rows of each token's slots on the token's rank. Each rank adds its own slots of a token in ascending order in
// FP32 and rounds to the payload's dtype; without `expand` its experts have done that. One sum of each rank goes to the token's
// rank, which adds them in ascending order of ranks in FP32 and rounds once. The gradient is dispatch without weights;
// combine_backward_out writes it to a buffer of the caller.
#include <ATen/ops/zeros.h>

#include "common/autograd.h"
#include "common/ops/expert_parallel.h"
#include "common/register.h"
#include "common/tensor.h"
#include "expert_parallel/ops/checks.h"

namespace transformer_plugin::expert_parallel {
namespace {

using at::Tensor;
using c10::SymInt;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Tensor combine_output(const Tensor& rows, const ReceivedRows& plan, const Tensor& source,
                      const SymInt& num_tokens, int64_t timeout_ms, bool expand) {
  constexpr const char* op = "combine";
  check_timeout(op, timeout_ms);
  const Argument argument{op, "rows", rows};
  check_dtype(argument, kPayloadTypes);
  check_dim(argument, 2);
  check_plan(op, plan, source, rows);
  if (expand) {
    check_size(argument, 0, source.sym_size(0), "the capacity of the plan");
  } else {
    check_size(argument, 0, plan.slot.sym_size(0), "the rows of 'slot'");
  }
  TP_CHECK_VALUE(num_tokens >= 0 && num_tokens <= plan.tokens(), op, "num_tokens",
                 "from 0 to max_tokens of the plan", num_tokens, "Pass the number of tokens of this rank");
  return empty(rows, {num_tokens, rows.sym_size(1)}, rows.scalar_type());
}

Tensor combine(const Tensor& rows, const Tensor& slot, const Tensor& source, int64_t num_tokens,
               std::string_view group_name, int64_t timeout_ms, int64_t grads_needed, bool expand,
               const OptionalTensor& received, const OptionalTensor& position) {
  constexpr const char* op = "combine";
  const ReceivedRows plan{slot, received, position};
  combine_output(rows, plan, source, num_tokens, timeout_ms, expand);
  ExpertParallelGroup group(op, group_name, timeout_ms, rows);
  const TokenLayout layout = layout_of(op, group, plan);
  TP_CHECK_VALUE(num_tokens <= layout.max_tokens, op, "num_tokens",
                 "from 0 to " << layout.max_tokens << " (max_tokens of the plan)", num_tokens,
                 "Pass the number of tokens of this rank");
  check_source(op, group, slot, source);
  const Payload sums{rows, phases::kCombineRows, expand ? OptionalTensor(slot) : std::nullopt};
  const Call call =
      exchange_call(group, phases::kCombineRows, layout, slot, "rows", rows.scalar_type(), rows.size(1))
          .set(fields::kRowsGradient, grads_needed > 0, "rows");
  return not_aliased(make_transport(group, layout)->combine({layout, call, {sums}}, num_tokens)[0], rows);
}

constexpr const char *kBackwardOp = "combine_backward", *kBackwardOutOp = "combine_backward_out";

Tensor combine_backward_output(const char* op, const Tensor& grad, const ReceivedRows& plan,
                               const Tensor& source, int64_t timeout_ms, bool expand) {
  check_timeout(op, timeout_ms);
  const Argument argument{op, "grad", grad};
  check_dtype(argument, kPayloadTypes);
  check_dim(argument, 2);
  check_plan(op, plan, source, grad);
  return empty(grad, {expand ? source.sym_size(0) : plan.slot.sym_size(0), grad.sym_size(1)},
               grad.scalar_type());
}

// The gradients of the tokens.
TokenExchange exchange_of(const char* op, const ExpertParallelGroup& group, const Tensor& grad,
                          const ReceivedRows& plan, const ExpertRows& rows) {
  const TokenLayout layout = layout_of(op, group, plan);
  check_source(op, group, plan.slot, rows.source);
  const Payload of_tokens =
      rows.payload(token_rows({op, "grad", grad}, layout.max_tokens), phases::kCombineBackwardRows);
  const Call call = exchange_call(group, phases::kCombineBackwardRows, layout, plan.slot, "grad",
                                  grad.scalar_type(), grad.size(1));
  return {layout, call, {of_tokens}};
}

Tensor combine_backward(const Tensor& grad, const Tensor& slot, const Tensor& source,
                        std::string_view group_name, int64_t timeout_ms, bool expand,
                        const OptionalTensor& received, const OptionalTensor& position) {
  const ReceivedRows plan{slot, received, position};
  combine_backward_output(kBackwardOp, grad, plan, source, timeout_ms, expand);
  ExpertParallelGroup group(kBackwardOp, group_name, timeout_ms, grad);
  const TokenExchange exchange = exchange_of(kBackwardOp, group, grad, plan, {expand, slot, source});
  return not_aliased(make_transport(group, exchange.layout)->dispatch(exchange)[0], grad);
}

void check_combine_backward_out(const Tensor& grad, const ReceivedRows& plan, const Tensor& source,
                                const Tensor& grad_rows, int64_t timeout_ms) {
  constexpr const char* op = kBackwardOutOp;
  const Tensor result = combine_backward_output(op, grad, plan, source, timeout_ms, true);
  check_no_gradient({op, "grad", grad}, "Second derivatives are not implemented");
  check_buffer({op, "grad_rows", grad_rows}, result);
}

void combine_backward_out(const Tensor& grad, const Tensor& slot, const Tensor& source,
                          const Tensor& grad_rows, std::string_view group_name, int64_t timeout_ms,
                          const OptionalTensor& received, const OptionalTensor& position) {
  const ReceivedRows plan{slot, received, position};
  check_combine_backward_out(grad, plan, source, grad_rows, timeout_ms);
  check_apart(
      kBackwardOutOp, {{"grad_rows", grad_rows}},
      {{"grad", grad}, {"slot", slot}, {"source", source}, {"received", received}, {"position", position}});
  ExpertParallelGroup group(kBackwardOutOp, group_name, timeout_ms, grad);
  const TokenExchange exchange =
      exchange_of(kBackwardOutOp, group, grad, plan, {true, slot, source, grad_rows});
  make_transport(group, exchange.layout)->dispatch(exchange);
  mark_written(grad_rows);
}

void combine_backward_out_meta(const Tensor& grad, const Tensor& slot, const Tensor& source,
                               const Tensor& grad_rows, std::string_view, int64_t timeout_ms,
                               const OptionalTensor& received, const OptionalTensor& position) {
  check_combine_backward_out(grad, {slot, received, position}, source, grad_rows, timeout_ms);
}

class CombineFunction : public CheckedFunction<CombineFunction> {
 public:
  static constexpr const char* kName = "combine";
  static constexpr bool is_traceable = true;

  static Tensor call_backward(const Tensor& grad, const Tensor& slot, const Tensor& source,
                              std::string_view group_name, int64_t timeout_ms, bool expand,
                              const OptionalTensor& received, const OptionalTensor& position) {
    return ops::combine_backward(grad, slot, source, group_name, timeout_ms, expand, received, position);
  }

  static Tensor forward(AutogradContext* ctx, const Tensor& rows, const Tensor& slot, const Tensor& source,
                        const SymInt& num_tokens, std::string_view group_name, int64_t timeout_ms,
                        bool expand, const OptionalTensor& received, const OptionalTensor& position) {
    ctx->save_for_backward({slot, source, received.value_or(Tensor()), position.value_or(Tensor())});
    ctx->set_materialize_grads(false);
    ctx->saved_data["num_tokens"] = num_tokens;
    ctx->saved_data["hidden_size"] = rows.sym_size(1);
    ctx->saved_data["dtype"] = static_cast<int64_t>(rows.scalar_type());
    ctx->saved_data["group_name"] = std::string(group_name);
    ctx->saved_data["timeout_ms"] = timeout_ms;
    ctx->saved_data["expand"] = expand;
    const BelowAutograd guard;
    return ops::combine(rows, slot, source, num_tokens, group_name, timeout_ms, 1, expand, received,
                        position);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list plan = ctx->get_saved_variables();
    auto& saved = ctx->saved_data;
    Tensor grad = grads[0];
    if (!grad.defined()) {  // counts as zero; other ranks may have gradients
      grad = at::zeros_symint({saved["num_tokens"].toSymInt(), saved["hidden_size"].toSymInt()},
                              plan[0].options().dtype(static_cast<at::ScalarType>(saved["dtype"].toInt())));
    }
    variable_list result(9);
    result[0] =
        call_backward(grad, plan[0], plan[1], saved["group_name"].toStringRef(), saved["timeout_ms"].toInt(),
                      saved["expand"].toBool(), as_optional(plan[2]), as_optional(plan[3]));
    return result;
  }
};

Tensor combine_autograd(const Tensor& rows, const Tensor& slot, const Tensor& source, SymInt num_tokens,
                        std::string_view group_name, int64_t timeout_ms, int64_t grads_needed, bool expand,
                        const OptionalTensor& received, const OptionalTensor& position) {
  if (any_requires_grad(rows)) {
    return CombineFunction::apply(rows, slot, source, num_tokens, group_name, timeout_ms, expand, received,
                                  position);
  }
  const BelowAutograd guard;
  // In a compiled graph `grads_needed` holds the value from the time of tracing.
  return ops::combine(rows, slot, source, num_tokens, group_name, timeout_ms, grads_needed, expand, received,
                      position);
}

Tensor combine_backward_autograd(const Tensor& grad, const Tensor& slot, const Tensor& source,
                                 std::string_view group_name, int64_t timeout_ms, bool expand,
                                 const OptionalTensor& received, const OptionalTensor& position) {
  check_once_differentiable("combine_backward", grad);
  const BelowAutograd guard;
  return CombineFunction::call_backward(grad, slot, source, group_name, timeout_ms, expand, received,
                                        position);
}

Tensor combine_meta(const Tensor& rows, const Tensor& slot, const Tensor& source, SymInt num_tokens,
                    std::string_view, int64_t timeout_ms, int64_t, bool expand,
                    const OptionalTensor& received, const OptionalTensor& position) {
  return combine_output(rows, {slot, received, position}, source, num_tokens, timeout_ms, expand);
}

Tensor combine_backward_meta(const Tensor& grad, const Tensor& slot, const Tensor& source, std::string_view,
                             int64_t timeout_ms, bool expand, const OptionalTensor& received,
                             const OptionalTensor& position) {
  return combine_backward_output(kBackwardOp, grad, {slot, received, position}, source, timeout_ms, expand);
}

}  // namespace

TP_IMPL_NO_GRADIENT(combine_backward_out, combine_backward_out, combine_backward_out_meta);
TP_IMPL(combine, combine, combine_meta, combine_autograd);
TP_IMPL(combine_backward, combine_backward, combine_backward_meta, combine_backward_autograd);

}  // namespace transformer_plugin::expert_parallel
