#include "linear/operand_formats.h"

#include <algorithm>
#include <string>

#include "quantize/ops/checks.h"
#include "quantize/ops/group_tables.h"

namespace transformer_plugin::linear {
namespace {

void check_family(const char* op, const char* argument, const Format& format, std::string_view key,
                  const OperandFormats& formats) {
  TP_CHECK_VALUE(format.family == formats.input.family, op, argument,
                 "a format of the family of input_format, '" << formats.input_key << "'", "'" << key << "'",
                 "Use the three formats of one recipe");
}

// FP8 tensor cores have the second operand in E4M3 where rows of both have scales.
void check_row_scaled_weight(const char* op, const OperandFormats& formats) {
  TP_CHECK_VALUE(!formats.weight.traits().has_row_scales || formats.weight.element == DType::kFloat8E4M3, op,
                 "weight_format", formats.weight.traits().name << " with e4m3",
                 "'" << formats.weight_key << "'", "Quantize the weight to e4m3");
}

// A random Hadamard transform applies to both operands of the weight gradient, where it cancels, and to nothing else.
void check_rotations(const char* op, const OperandFormats& formats) {
  TP_CHECK_VALUE(!formats.weight.random_hadamard, op, "weight_format",
                 "no 'rht', which only the other two formats may have together",
                 "'" << formats.weight_key << "'", "Use the three formats of one recipe");
  TP_CHECK_VALUE(formats.grad.random_hadamard == formats.input.random_hadamard, op, "grad_format",
                 "'rht' if and only if input_format, '" << formats.input_key << "', has it",
                 "'" << formats.grad_key << "'", "Use the three formats of one recipe");
}

// Of dimension `dim`, which has `size` elements.
void check_width(const Argument& argument, int64_t dim, const c10::SymInt& size,
                 const OperandFormats& formats, const char* advice) {
  const int64_t block =
      std::max({formats.input.block_size(), formats.weight.block_size(), formats.grad.block_size()});
  const std::string which = dim == -1 ? "a last dimension" : "a dimension " + std::to_string(dim);
  TP_CHECK_VALUE(size % block == 0, argument.op, argument.name,
                 which << " that is a multiple of " << block << ", the block of "
                       << (formats.input.is_nv() ? "nvfp4" : "mxfp8"),
                 describe(argument.tensor), advice);
}

}  // namespace

void check_block_width(const Argument& argument, int64_t dim, const OperandFormats& formats,
                       const char* advice) {
  check_width(argument, dim, argument.tensor.sym_size(dim), formats, advice);
}

OperandFormats operand_formats(const char* op, std::string_view input, std::string_view weight,
                               std::string_view grad) {
  if (input == "none" && weight == "none" && grad == "none") return {input, weight, grad, {}, {}, {}};
  const OperandFormats formats{input,
                               weight,
                               grad,
                               parse_format(op, "input_format", input),
                               parse_format(op, "weight_format", weight),
                               parse_format(op, "grad_format", grad)};
  check_family(op, "weight_format", formats.weight, weight, formats);
  check_family(op, "grad_format", formats.grad, grad, formats);
  check_rotations(op, formats);
  check_row_scaled_weight(op, formats);
  return formats;
}

void check_layer_widths(const Argument& input, const WeightArgument& weight, const c10::SymInt& rows,
                        const OperandFormats& formats) {
  check_block_width(input, -1, formats, "Pad it with zeros, for example with torch.nn.functional.pad");
  const std::string name = weight.first_name();
  check_width({weight.op, name.c_str(), weight.first()}, weight.first().dim() - 2, rows, formats,
              "Pad the weight with rows of zeros, and drop those columns of the output");
}

void check_ragged_formats(const char* op, const OperandFormats& formats) {
  const auto check_rows = [&](const char* name, const auto& format, const auto& key) {
    TP_CHECK_VALUE(!format.square_blocks, op, name, "blocks along rows, which end where a group ends",
                   "'" << key << "'", "Square blocks are for the weight");
  };
  check_rows("input_format", formats.input, formats.input_key);
  check_rows("grad_format", formats.grad, formats.grad_key);
}

void check_save_original_input(const char* op, bool save, const OperandFormats& formats) {
  TP_CHECK_VALUE(!save || !formats.input.stochastic_rounding, op, "save_original_input",
                 "False with stochastic rounding of the input, whose backward would draw other numbers",
                 "True with input_format '" << formats.input_key << "'",
                 "Leave it out, or round the input to nearest");
}

void check_quantizable(const char* op, const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& group_sizes, const OperandFormats& formats,
                       bool columns) {
  const Argument rows{op, "input", input};
  const at::Tensor* sizes = group_sizes ? &*group_sizes : nullptr;
  int64_t multiple = 1;
  if (formats.input.is_quantized()) {
    const bool quantizes_columns = columns && formats.input.traits().has_group_columns;
    quantize::check_matrix(rows, sizes, formats.input, quantizes_columns);
    quantize::check_matrix({op, "weight", weight}, nullptr, formats.weight);
    multiple = quantize::group_multiple(formats.input, quantizes_columns);
  }
  if (sizes) quantize::check_group_values(rows, *sizes, multiple);
}

}  // namespace transformer_plugin::linear
