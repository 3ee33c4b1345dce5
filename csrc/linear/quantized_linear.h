// linear and grouped_linear with quantized operands: input, weight and gradient each in a format, and the three GEMMs of a
// training step.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "common/check.h"
#include "common/format.h"
#include "gemm/args/launch_options.h"
#include "linear/caller_buffers.h"
#include "linear/weights.h"

namespace transformer_plugin::linear {

// The formats of the operands of one layer, all of one family.
struct OperandFormats {
  std::string_view input_key, weight_key, grad_key;
  Format input, weight, grad;

  bool native() const { return input.family == FormatFamily::kNone; }
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

// The ranks over which the rows of an input are sharded (linear/input_rows.h).
struct InputRanks {
  int64_t ranks = 1;  // 1: the input has all rows
  std::string_view group = {};

  bool is_sharded() const { return ranks > 1; }
};

// input [M, K] and weight [N, K]; or, with group sizes, input [T, K] and weight [G, N, K] or several [N, K].
// `quantized_weight` (linear/quantized_weight.h) is read instead of `weight`, which then gives sizes and dtype only.
struct LinearArguments {
  const at::Tensor& input;
  at::TensorList weight;
  const std::optional<at::Tensor>& group_sizes;
  const std::optional<at::Tensor>& bias;
  const std::optional<at::Tensor>& bias_scale;
  const std::optional<at::TensorList>& quantized_weight;
  gemm::LaunchOptions options = {};  // of the grouped GEMMs
  MainGrad main_grad = {};
  CallerBuffers buffers = {};
  bool save_original_input = false;  // for the weight gradient, which quantizes it in the backward
  InputRanks input_ranks = {};
  const sharded::WeightShard& shard = sharded::kUnsharded;
};

// Refuses, in the name of `op`, what the ops called below would refuse. `columns`: quantized columnwise too, for the weight
// gradient.
void check_quantizable(const char* op, const LinearArguments& layer, const OperandFormats& formats,
                       bool columns);
// The groups of columnwise quantization: those of the rows, or none. While a graph with a symbolic number of rows is traced, all
// rows are one group: the same bits, but the scales have at least two block rows. torch guards on dimensions that may be 1, and
// would recompile when the rows no longer fit one block.
// `ranks`: how many have as many rows as `input`, of one product.
std::optional<at::Tensor> column_groups(const at::Tensor& input, const std::optional<at::Tensor>& group_sizes,
                                        const OperandFormats& formats, int64_t ranks = 1);
// Without autograd.
at::Tensor quantized_linear_forward(const LinearArguments& layer, const OperandFormats& formats);
// With autograd; called from an Autograd kernel. Unquantized operands too, which a main_grad needs.
at::Tensor quantized_linear_autograd(const LinearArguments& layer, const OperandFormats& formats);

}  // namespace transformer_plugin::linear
