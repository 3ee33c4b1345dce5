// Helpers of plan, dispatch and combine, and the registration of their phases.
#include "expert_parallel/ops/checks.h"

#include <algorithm>

#include "common/tensor.h"
#include "routing/rows_args.h"

namespace transformer_plugin::expert_parallel {
namespace {

const distributed::PhaseRegistration registration(phases::kAll);

void check_map(const Argument& map, const Argument& data, int64_t dim = 1) {
  check_dtype(map, {at::kInt});
  check_dim(map, dim);
  check_same_device(map, data);
}

}  // namespace

using at::Tensor;

at::ScalarType weight_type(at::ScalarType payload) {
  return payload == at::kDouble ? at::kDouble : at::kFloat;
}

void check_received(const char* op, const ReceivedRows& rows, const Tensor& data) {
  const Argument slot{op, "slot", rows.slot}, data_argument{op, "data", data};
  check_dtype(slot, {at::kInt});
  check_dim(slot, 2);
  check_same_device(slot, data_argument);
  TP_CHECK_VALUE(rows.slot.sym_size(1) <= routing::kMaxTopk, op, "slot",
                 "at most " << routing::kMaxTopk << " columns", describe(rows.slot),
                 "Choose fewer experts for each token");
  TP_CHECK_VALUE(rows.received.has_value() == rows.position.has_value(), op,
                 (rows.received ? "position" : "received"),
                 "both maps of the received rows, 'received' and 'position', or neither", "one of them",
                 "Pass both as plan returned them, or None where they are empty");
  if (!rows.received) return;
  const Argument received{op, "received", *rows.received};
  if (rows.is_by_records()) {
    const Argument position{op, "position", *rows.position};
    check_map(received, data_argument, 2);
    check_size(received, 0, 4, "that of a plan by records");
    check_contiguous(received);
    check_map(position, data_argument, 3);
    check_size(position, 0, 3, "that of a plan by records");
    return check_contiguous(position);
  }
  check_map(received, data_argument);
  check_size(received, 0, rows.slot.sym_size(0), "the rows of 'slot'");
  check_map({op, "position", *rows.position}, data_argument);
}

void check_plan(const char* op, const ReceivedRows& rows, const Tensor& source, const Tensor& data) {
  check_received(op, rows, data);
  check_map({op, "source", source}, {op, "data", data});
}

void check_count(const char* op, const char* argument, const c10::SymInt& count, const c10::SymInt& largest,
                 const char* advice) {
  TP_CHECK_VALUE(count >= 0 && count <= largest, op, argument, "from 0 to " << largest, count, advice);
}

TokenLayout layout_of(const char* op, const RankGroup& group, const ReceivedRows& rows) {
  if (rows.is_by_records()) {
    TP_CHECK_VALUE(rows.received->size(1) == group.size() + 1 &&
                       rows.position->size(2) == std::min(rows.slot.size(1), group.size()),
                   op, "position", "a plan of this group of " << group.size() << " ranks",
                   describe(*rows.position), "Pass the plan and the group name that belong together");
    return {rows.position->size(1), rows.slot.size(0), rows.received, rows.position};
  }
  const Tensor& of_tokens = rows.position ? *rows.position : rows.slot;
  TP_CHECK_VALUE(of_tokens.size(0) % group.size() == 0, op, (rows.position ? "position" : "slot"),
                 "a plan of this group of " << group.size() << " ranks", describe(of_tokens),
                 "Pass the plan and the group name that belong together");
  return {of_tokens.size(0) / group.size(), rows.slot.size(0), rows.received, rows.position};
}

void check_source(const char* op, const ExpertParallelGroup& group, const Tensor& slot,
                  const Tensor& source) {
  const auto plan = group.find_plan(slot);
  TP_CHECK_VALUE(!plan || plan->source == memory_of(source), op, "source",
                 "that of the plan that made 'slot'", "another tensor", "Pass all tensors of one plan");
}

Call exchange_call(const ExpertParallelGroup& group, const Phase& phase, const TokenLayout& layout,
                   const Tensor& slot, const char* argument, at::ScalarType dtype, int64_t width) {
  Call call = make_call(phase);
  call.set(fields::kDtype, static_cast<int64_t>(dtype), argument)
      .set(fields::kWidth, width, argument)
      .set(fields::kTopk, slot.size(1), "slot")
      .set(fields::kMaxTokens, layout.max_tokens, "slot")
      .set(fields::kRecords, layout.is_by_records(), "received");
  if (const auto plan = group.find_plan(slot)) {
    TP_CHECK_VALUE(plan->position == memory_of(layout.position), phase.op, "position",
                   (plan->position ? "the maps of the compact plan that made 'slot'"
                                   : "None, as 'slot' is of no compact plan"),
                   (layout.position ? "another map" : "None"), "Pass all tensors of one plan");
    call.set(fields::kPlan, plan->call, "slot").set(fields::kPlannedTokens, plan->tokens, "tokens");
  }
  return call;
}

Tensor token_rows(const Argument& rows, int64_t max_tokens) {
  const Tensor& tensor = rows.tensor;
  TP_CHECK_VALUE(tensor.size(0) <= max_tokens, rows.op, rows.name,
                 "at most " << max_tokens << " rows (max_tokens of the plan)", describe(tensor),
                 "Make the plan with a larger max_tokens on every rank");
  return tensor.contiguous();
}

Tensor not_aliased(const Tensor& result, const Tensor& argument) {
  return result.is_alias_of(argument) ? result.clone(at::MemoryFormat::Contiguous) : result;
}

void check_buffer(const Argument& buffer, const Tensor& result) {
  const Tensor& tensor = buffer.tensor;
  check_dtype(buffer, {result.scalar_type()});
  TP_CHECK_VALUE(tensor.sym_sizes() == result.sym_sizes(), buffer.op, buffer.name,
                 "the sizes " << result.sym_sizes(), describe(tensor), "Allocate it with those sizes");
  check_same_device(buffer, {buffer.op, "the result", result});
  check_contiguous(buffer);
  check_written(buffer);
}

}  // namespace transformer_plugin::expert_parallel
