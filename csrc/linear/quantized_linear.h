// linear and grouped_linear with rounded operands: the input, the weight and the gradient each in a format, and the
// three products of a training step from them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "common/check.h"
#include "common/format.h"

namespace transformer_plugin::gemm {

// The formats of one layer, of one family.
struct RoleFormats {
  std::string_view input_key, weight_key, grad_key;
  Format input, weight, grad;

  bool native() const { return input.family == FormatFamily::kNone; }
  // Whether the weight's values are the same along rows and columns, so that one copy serves both directions.
  bool symmetric_weight() const { return !weight.has_blocks() || weight.square_blocks; }
};

RoleFormats role_formats(const char* op, std::string_view input, std::string_view weight,
                         std::string_view grad);
// Blocks of 16 or 32 lie along this dimension.
void check_block_width(const Argument& argument, int64_t dim, const RoleFormats& formats, const char* advice);
// Along both widths of a layer: the backward rounds the gradient along the output's.
void check_layer_widths(const Argument& input, const Argument& weight, const RoleFormats& formats);
// Of rows in groups: blocks of the input and the gradient lie along rows.
void check_ragged_formats(const char* op, const RoleFormats& formats);

// input [M, K] and weight [N, K]; or, with group sizes, input [T, K] and weight [G, N, K]. A weight that was rounded
// beforehand (linear/quantized_weight.h) is read in place of `weight`, which then says its sizes and dtype alone.
struct LayerArguments {
  const at::Tensor& input;
  const at::Tensor& weight;
  const std::optional<at::Tensor>& group_sizes;
  const std::optional<at::Tensor>& bias;
  const std::optional<at::Tensor>& bias_scale;
  const std::optional<at::TensorList>& quantized_weight;
};

// What the ops that a layer is made of would refuse of its rows and their groups, in the name of `op`, before the first of
// them. `columns`: rounded along columns too, for the gradient of the weight.
void check_rounding(const char* op, const LayerArguments& layer, const RoleFormats& formats, bool columns);
// Without a gradient.
at::Tensor low_precision_forward(const LayerArguments& layer, const RoleFormats& formats);
// With one, from an Autograd kernel.
at::Tensor low_precision_product(const LayerArguments& layer, const RoleFormats& formats);

}  // namespace transformer_plugin::gemm
