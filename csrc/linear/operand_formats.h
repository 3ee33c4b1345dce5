// The formats of the three operands of a linear layer, and which of them go together.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "common/check.h"
#include "common/format.h"
#include "linear/weights.h"

namespace transformer_plugin::linear {

// The formats of the operands of one layer, all of one family.
struct OperandFormats {
  std::string_view input_key, weight_key, grad_key;
  Format input, weight, grad;

  bool unquantized() const { return input.family == FormatFamily::kNone; }
  // Whether the rowwise and columnwise weight have the same values, so that one copy serves both directions.
  bool symmetric_weight() const {
    return weight.square_blocks || weight.family == FormatFamily::kFp8Tensor || !weight.is_quantized();
  }
};

OperandFormats operand_formats(const char* op, std::string_view input, std::string_view weight,
                               std::string_view grad);
// `dim` must be a multiple of the block of 16 or 32 elements.
void check_block_width(const Argument& argument, int64_t dim, const OperandFormats& formats,
                       const char* advice);
// Both widths of a layer: the backward quantizes the gradient along the width of the output, the `rows` of the full
// weight.
void check_layer_widths(const Argument& input, const WeightArgument& weight, const c10::SymInt& rows,
                        const OperandFormats& formats);
// With groups the blocks of input and gradient lie along rows.
void check_ragged_formats(const char* op, const OperandFormats& formats);
// Refuses an input that a second quantization would round to other values.
void check_save_original_input(const char* op, bool save, const OperandFormats& formats);
// Refuses, in the name of `op`, what the ops called below would refuse. `weight`: or the first of several matrices. `columns`:
// quantized columnwise too, for the weight gradient.
void check_quantizable(const char* op, const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& group_sizes, const OperandFormats& formats,
                       bool columns);

}  // namespace transformer_plugin::linear
