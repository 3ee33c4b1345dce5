// combine: sums the rows of each token's slots on the token's rank. Each rank adds its own slots of a token
// in ascending order in FP32 and rounds to the payload's dtype; an all-to-all moves these parts
// [R * max_tokens, H] to the tokens' ranks, which add them in ascending order of ranks in FP32 and round
// once. The gradient is dispatch without weights.
#include <ATen/ops/zeros.h>

#include "common/autograd.h"
#include "common/register.h"
#include "common/tensor.h"
#include "expert_parallel/exchange.h"
#include "routing/rows.h"

namespace transformer_plugin::expert_parallel {
namespace {

using at::Tensor;
using c10::SymInt;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

Tensor combine_output(const Tensor& rows, const Tensor& slot, const Tensor& source, const SymInt& num_tokens,
                      int64_t timeout_ms) {
  constexpr const char* op = "combine";
  check_timeout(op, timeout_ms);
  const Argument argument{op, "rows", rows};
  check_dtype(argument, kPayloadTypes);
  check_dim(argument, 2);
  check_plan(op, slot, source, rows);
  check_size(argument, 0, source.sym_size(0), "the capacity of the plan");
  TP_CHECK_VALUE(num_tokens >= 0 && num_tokens <= slot.sym_size(0), op, "num_tokens",
                 "from 0 to max_tokens of the plan", num_tokens, "Pass the number of tokens of this rank");
  return empty(rows, {num_tokens, rows.sym_size(1)}, rows.scalar_type());
}

Tensor combine(const Tensor& rows, const Tensor& slot, const Tensor& source, int64_t num_tokens,
               std::string group_name, int64_t timeout_ms, int64_t wanted) {
  constexpr const char* op = "combine";
  combine_output(rows, slot, source, num_tokens, timeout_ms);
  ExpertParallelGroup group(op, group_name, timeout_ms, rows);
  const int64_t max_tokens = tokens_per_rank(op, group, slot);
  TP_CHECK_VALUE(num_tokens <= max_tokens, op, "num_tokens",
                 "from 0 to " << max_tokens << " (max_tokens of the plan)", num_tokens,
                 "Pass the number of tokens of this rank");
  if (group.size() == 1) return routing::sum_slots(rows, slot.narrow(0, 0, num_tokens), std::nullopt);
  const Tensor parts = routing::sum_slots(rows, slot, std::nullopt);
  group.begin_call(exchange_call(group, phases::kCombineRows, slot, "rows", rows.scalar_type(), rows.size(1))
                       .set(fields::kRowsGradient, wanted > 0, "rows"),
                   1);
  return sum_ranks(group.start_all_to_all(parts, phases::kCombineRows).wait(), group.size(), num_tokens);
}

Tensor combine_backward_output(const Tensor& grad, const Tensor& slot, const Tensor& source,
                               int64_t timeout_ms) {
  constexpr const char* op = "combine_backward";
  check_timeout(op, timeout_ms);
  const Argument argument{op, "grad", grad};
  check_dtype(argument, kPayloadTypes);
  check_dim(argument, 2);
  check_plan(op, slot, source, grad);
  return empty(grad, {source.sym_size(0), grad.sym_size(1)}, grad.scalar_type());
}

Tensor combine_backward(const Tensor& grad, const Tensor& slot, const Tensor& source, std::string group_name,
                        int64_t timeout_ms) {
  constexpr const char* op = "combine_backward";
  combine_backward_output(grad, slot, source, timeout_ms);
  ExpertParallelGroup group(op, group_name, timeout_ms, grad);
  const Tensor local = pad_rows({op, "grad", grad}, tokens_per_rank(op, group, slot));
  group.begin_call(
      exchange_call(group, phases::kCombineBackwardRows, slot, "grad", grad.scalar_type(), grad.size(1)), 1);
  return routing::gather_rows(group.all_gather(local, phases::kCombineBackwardRows), source, slot);
}

class CombineFunction : public CheckedFunction<CombineFunction> {
 public:
  static constexpr const char* kName = "combine";
  static constexpr bool is_traceable = true;

  static Tensor call(const Tensor& rows, const Tensor& slot, const Tensor& source, const SymInt& num_tokens,
                     const std::string& group_name, int64_t timeout_ms, int64_t wanted) {
    using Signature =
        Tensor(const Tensor&, const Tensor&, const Tensor&, SymInt, std::string, int64_t, int64_t);
    static const auto op = find_op<Signature>("combine");
    return op.call(rows, slot, source, num_tokens, group_name, timeout_ms, wanted);
  }

  static Tensor call_backward(const Tensor& grad, const Tensor& slot, const Tensor& source,
                              const std::string& group_name, int64_t timeout_ms) {
    using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, std::string, int64_t);
    static const auto op = find_op<Signature>("combine_backward");
    return op.call(grad, slot, source, group_name, timeout_ms);
  }

  static Tensor forward(AutogradContext* ctx, const Tensor& rows, const Tensor& slot, const Tensor& source,
                        const SymInt& num_tokens, const std::string& group_name, int64_t timeout_ms) {
    ctx->save_for_backward({slot, source});
    ctx->set_materialize_grads(false);
    ctx->saved_data["num_tokens"] = num_tokens;
    ctx->saved_data["hidden_size"] = rows.sym_size(1);
    ctx->saved_data["dtype"] = static_cast<int64_t>(rows.scalar_type());
    ctx->saved_data["group_name"] = group_name;
    ctx->saved_data["timeout_ms"] = timeout_ms;
    const BelowAutograd guard;
    return call(rows, slot, source, num_tokens, group_name, timeout_ms, 1);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list tensors = ctx->get_saved_variables();
    auto& saved = ctx->saved_data;
    Tensor grad = grads[0];
    if (!grad.defined()) {  // counts as zero; other ranks may have gradients
      grad =
          at::zeros_symint({saved["num_tokens"].toSymInt(), saved["hidden_size"].toSymInt()},
                           tensors[0].options().dtype(static_cast<at::ScalarType>(saved["dtype"].toInt())));
    }
    return {call_backward(grad, tensors[0], tensors[1], saved["group_name"].toStringRef(),
                          saved["timeout_ms"].toInt()),
            Tensor(),
            Tensor(),
            Tensor(),
            Tensor(),
            Tensor()};
  }
};

Tensor combine_autograd(const Tensor& rows, const Tensor& slot, const Tensor& source, SymInt num_tokens,
                        std::string group_name, int64_t timeout_ms, int64_t wanted) {
  if (any_wants_grad(rows)) {
    return CombineFunction::apply(rows, slot, source, num_tokens, group_name, timeout_ms);
  }
  const BelowAutograd guard;
  // In a compiled graph `wanted` holds the value from the time of tracing.
  return CombineFunction::call(rows, slot, source, num_tokens, group_name, timeout_ms, wanted);
}

Tensor combine_backward_autograd(const Tensor& grad, const Tensor& slot, const Tensor& source,
                                 std::string group_name, int64_t timeout_ms) {
  check_once_differentiable("combine_backward", grad);
  const BelowAutograd guard;
  return CombineFunction::call_backward(grad, slot, source, group_name, timeout_ms);
}

Tensor combine_meta(const Tensor& rows, const Tensor& slot, const Tensor& source, SymInt num_tokens,
                    std::string, int64_t timeout_ms, int64_t) {
  return combine_output(rows, slot, source, num_tokens, timeout_ms);
}

Tensor combine_backward_meta(const Tensor& grad, const Tensor& slot, const Tensor& source, std::string,
                             int64_t timeout_ms) {
  return combine_backward_output(grad, slot, source, timeout_ms);
}

}  // namespace

TP_IMPL("combine", combine, combine_meta, combine_autograd);
TP_IMPL("combine_backward", combine_backward, combine_backward_meta, combine_backward_autograd);

}  // namespace transformer_plugin::expert_parallel
