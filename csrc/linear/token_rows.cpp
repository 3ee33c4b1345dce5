#include "linear/token_rows.h"

#include "common/autograd.h"
#include "common/ops/routing.h"
#include "common/tensor.h"
#include "gemm/dispatch/select.h"
#include "linear/caller_buffers.h"
#include "linear/nonfinite.h"
#include "quantize/ops/calls.h"
#include "quantize/ops/indexed_rows.h"

namespace transformer_plugin::linear {
namespace {

// Of both directions or of columns, whose quantized data the products read; a mark needs the rows themselves.
bool quantizes_tokens(const at::Tensor& tokens, const Format& format, std::string_view key) {
  return format.is_quantized() && !marks_nonfinite(key) && gemm::has_quantized_kernels(tokens) &&
         quantize::quantizes_by_index(format, tokens.scalar_type(), tokens.device());
}

}  // namespace

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor TokenRows::gather(const Tensor& tokens, const Tensor& group_sizes) const {
  return ops::permute_rows(tokens, slot, source, group_sizes);
}

Tensor TokenRows::sum(const Tensor& rows, const OptionalTensor& out) const {
  return written_to(ops::unpermute(rows, slot, source, std::nullopt), out);
}

Tensor written_to(const Tensor& result, const OptionalTensor& out) {
  if (!out) return result;
  Tensor(*out).copy_(result);
  mark_written(*out);
  return *out;
}

void check_token_rows(const Argument& input, const TokenRows& rows) {
  const bool has_slot = rows.slot.defined(), has_source = rows.source.defined();
  TP_CHECK_VALUE(has_slot == has_source, input.op, (has_slot ? "source" : "slot"),
                 "both maps of assign_slots, 'slot' and 'source', or neither", "one of them",
                 "Pass both, or rows without them");
  if (!has_slot) return;
  const Argument slot{input.op, "slot", rows.slot}, source{input.op, "source", rows.source};
  check_dtype(slot, {at::kInt});
  check_dim(slot, 2);
  check_same_device(slot, input);
  check_dtype(source, {at::kInt});
  check_dim(source, 1);
  check_same_device(source, input);
  check_contiguous(source);
}

bool reads_tokens(const Format& format, std::string_view key) {
  return !format.is_quantized() && !marks_nonfinite(key);
}

bool reads_gradient(const Tensor& grad, const Tensor& activation, const Format& format,
                    std::string_view key) {
  const auto columns = activation.sym_size(-1).maybe_as_int();
  if (columns && !gemm::gathers_wgrad(*columns)) return false;
  const auto width = grad.sym_size(1).maybe_as_int();  // unknown to some tracers
  return reads_tokens(format, key) && grad.element_size() == 2 && (!width || *width % 8 == 0) &&
         gemm::has_quantized_kernels(grad);
}

QuantizedOperand rows_operand(const Tensor& tokens, const TokenRows& rows, const Tensor& group_sizes,
                              const Format& format, std::string_view key, bool rowwise, bool columnwise,
                              bool copies) {
  if (!rows.given()) return quantize_operand(tokens, group_sizes, format, key, rowwise, columnwise);
  if (columnwise && quantizes_tokens(tokens, format, key)) {
    return operand_of(quantize::call_quantize(tokens, key, group_sizes, {rowwise, columnwise}, std::nullopt,
                                              std::nullopt, std::nullopt, rows.source, /*zero_tail=*/false),
                      format, key);
  }
  if (copies || !reads_tokens(format, key)) {
    return quantize_operand(rows.gather(tokens, group_sizes), group_sizes, format, key, rowwise, columnwise,
                            /*zero_tail=*/false);
  }
  QuantizedOperand operand = quantize_operand(tokens, std::nullopt, format, key, rowwise, columnwise);
  operand.rowwise.row_index = operand.columnwise.row_index = rows.source;
  return operand;
}

}  // namespace transformer_plugin::linear
