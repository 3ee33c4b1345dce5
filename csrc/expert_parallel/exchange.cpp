// Helpers of plan, dispatch and combine, and the registration of their phases.
#include "expert_parallel/exchange.h"

#include <ATen/ops/zeros.h>

#include "common/tensor.h"
#include "expert_parallel/exchange_args.h"
#include "routing/rows_args.h"

namespace transformer_plugin::expert_parallel {
namespace {

const distributed::PhaseRegistration registration(phases::kAll);

}  // namespace

using at::Tensor;

at::ScalarType weight_type(at::ScalarType payload) {
  return payload == at::kDouble ? at::kDouble : at::kFloat;
}

void check_plan(const char* op, const Tensor& slot, const Tensor& source, const Tensor& data) {
  const Argument slot_argument{op, "slot", slot};
  const Argument source_argument{op, "source", source};
  const Argument data_argument{op, "data", data};
  check_dtype(slot_argument, {at::kInt});
  check_dim(slot_argument, 2);
  check_same_device(slot_argument, data_argument);
  TP_CHECK_VALUE(slot.sym_size(1) <= routing::kMaxTopk, op, "slot",
                 "at most " << routing::kMaxTopk << " columns", describe(slot),
                 "Choose fewer experts for each token");
  check_dtype(source_argument, {at::kInt});
  check_dim(source_argument, 1);
  check_same_device(source_argument, data_argument);
}

Call exchange_call(const ExpertParallelGroup& group, const Phase& phase, const Tensor& slot,
                   const char* argument, at::ScalarType dtype, int64_t width) {
  Call call = make_call(phase);
  call.set(fields::kDtype, static_cast<int64_t>(dtype), argument)
      .set(fields::kWidth, width, argument)
      .set(fields::kTopk, slot.size(1), "slot")
      .set(fields::kMaxTokens, slot.size(0) / group.size(), "slot");
  if (const auto plan = group.find_plan(slot))
    call.set(fields::kPlan, plan->call, "slot").set(fields::kPlannedTokens, plan->tokens, "tokens");
  return call;
}

int64_t tokens_per_rank(const char* op, const RankGroup& group, const Tensor& slot) {
  TP_CHECK_VALUE(slot.size(0) % group.size() == 0, op, "slot",
                 "a plan of this group of " << group.size() << " ranks", describe(slot),
                 "Pass the plan and the group name that belong together");
  return slot.size(0) / group.size();
}

void check_count(const char* op, const char* argument, const c10::SymInt& count, const c10::SymInt& largest,
                 const char* advice) {
  TP_CHECK_VALUE(count >= 0 && count <= largest, op, argument, "from 0 to " << largest, count, advice);
}

Tensor pad_rows(const Argument& rows, int64_t max_tokens) {
  const Tensor& tensor = rows.tensor;
  const int64_t tokens = tensor.size(0);
  TP_CHECK_VALUE(tokens <= max_tokens, rows.op, rows.name,
                 "at most " << max_tokens << " rows (max_tokens of the plan)", describe(tensor),
                 "Make the plan with a larger max_tokens on every rank");
  if (tokens == max_tokens) return tensor.contiguous();
  const Tensor padded = at::zeros({max_tokens, tensor.size(1)}, tensor.options());
  padded.narrow(0, 0, tokens).copy_(tensor);
  return padded;
}

}  // namespace transformer_plugin::expert_parallel
