#include "linear/token_rows.h"

#include "common/autograd.h"
#include "common/tensor.h"
#include "linear/caller_buffers.h"
#include "linear/nonfinite.h"

namespace transformer_plugin::linear {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor TokenRows::gather(const Tensor& tokens) const {
  static const auto op = find_op<Tensor(const Tensor&, const Tensor&, const Tensor&)>("permute_rows");
  return op.call(tokens, slot, source);
}

Tensor TokenRows::sum(const Tensor& rows, const OptionalTensor& out) const {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, OptionalTensorArg);
  static const auto op = find_op<Signature>("unpermute");
  const Tensor sums = op.call(rows, slot, source, std::nullopt);
  if (!out) return sums;
  Tensor(*out).copy_(sums);
  mark_written(*out);
  return *out;
}

void check_token_rows(const Argument& input, const OptionalTensor& slot, const OptionalTensor& source) {
  TP_CHECK_VALUE(slot.has_value() == source.has_value(), input.op, (slot ? "source" : "slot"),
                 "both maps of assign_slots, 'slot' and 'source', or neither", "one of them",
                 "Pass both, or rows without them");
  if (!slot) return;
  const Argument slot_argument{input.op, "slot", *slot}, source_argument{input.op, "source", *source};
  check_dtype(slot_argument, {at::kInt});
  check_dim(slot_argument, 2);
  check_same_device(slot_argument, input);
  check_size(slot_argument, 0, input.tensor.sym_size(0), "the rows of 'input'");
  check_dtype(source_argument, {at::kInt});
  check_dim(source_argument, 1);
  check_same_device(source_argument, input);
  check_contiguous(source_argument);
}

bool reads_tokens(const Format& format, std::string_view key) {
  return !format.is_quantized() && !marks_nonfinite(key);
}

QuantizedOperand rows_operand(const Tensor& tokens, const TokenRows& rows, const Tensor& group_sizes,
                              const Format& format, std::string_view key, bool rowwise, bool columnwise,
                              bool copies) {
  if (!rows.given()) return quantize_operand(tokens, group_sizes, format, key, rowwise, columnwise);
  if (copies || !reads_tokens(format, key)) {
    return quantize_operand(rows.gather(tokens), group_sizes, format, key, rowwise, columnwise);
  }
  QuantizedOperand operand = quantize_operand(tokens, std::nullopt, format, key, rowwise, columnwise);
  operand.rowwise.row_index = operand.columnwise.row_index = rows.source;
  return operand;
}

}  // namespace transformer_plugin::linear
