// Quantized operands of a layer: input, weight and gradient, each in its format.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/quantized.h"
#include "gemm/args/launch_options.h"
#include "linear/linear_call.h"
#include "quantize/ops/directions.h"

namespace transformer_plugin::linear {

// A matrix quantized along rows, and along columns (stored transposed); undefined where a direction is not needed. Where a
// direction is not quantized (formats none and bf16, and columns in formats without has_group_columns) it is the matrix itself, not
// transposed.
struct QuantizedOperand {
  Quantized rowwise, columnwise;
};

// The tensors that a quantize op returned; amaxes are undefined.
QuantizedOperand operand_of(quantize::Outputs&& outputs, const Format& format, std::string_view key);

// Without `zero_tail` nothing is quantized of the rows past the last group, and the operand has any bits there, which the
// products of groups do not read.
QuantizedOperand quantize_operand(const at::Tensor& x, const std::optional<at::Tensor>& group_sizes,
                                  const Format& format, std::string_view key, bool rows, bool columns,
                                  bool zero_tail = true);

// The groups of columnwise quantization: those of the rows, or none. While a graph with a symbolic number of rows is traced, all
// rows are one group: the same bits, but the scales have at least two block rows. torch guards on dimensions that may be 1, and
// would recompile when the rows no longer fit one block.
// `ranks`: how many have as many rows as `input`, of one product.
std::optional<at::Tensor> column_groups(const at::Tensor& input, const std::optional<at::Tensor>& group_sizes,
                                        const OperandFormats& formats, int64_t ranks = 1);

// A quantized gradient, and the gradient of the bias where one op computes both.
struct QuantizedGradient {
  QuantizedOperand values;
  at::Tensor bias;  // undefined, or [N], or [G, N] with group sizes
};

QuantizedGradient quantize_gradient(const at::Tensor& grad, const std::optional<at::Tensor>& group_sizes,
                                    const Format& format, std::string_view key, bool rows, bool columns,
                                    bool with_bias, bool zero_tail = true);

// A weight [.., N, K]: operand b of the forward, with transpose_b; and of the data gradient. Several matrices are quantized into
// one stack. Without scales they stay where they are: `matrices` are then read in place of the data of both.
struct QuantizedWeight {
  Quantized forward;
  Quantized backward;  // with transpose_b if it is columnwise
  std::vector<at::Tensor> matrices = {};
  // Of several matrices that are sharded over ranks: this rank's shards, which the backward gathers again.
  std::vector<at::Tensor> shards = {};

  // For the backward, besides `backward`.
  const std::vector<at::Tensor>& matrices_to_save() const { return shards.empty() ? matrices : shards; }
};

// Whether the data gradient needs the columnwise weight: because its values differ from the rowwise ones, or because the FP8
// kernels need K-major data.
bool quantizes_weight_columnwise(const at::Tensor& weight, const OperandFormats& formats);
// `weight`: one tensor [.., N, K], or several matrices [N, K].
QuantizedWeight quantize_weight_operand(at::TensorList weight, const OperandFormats& formats, bool backward);
// Copies the weight, converted, into one tensor.
void copy_weight(at::TensorList weight, const at::Tensor& out);
// Both directions into given buffers. With noop = 1 on the device every byte of them stays.
void quantize_weight_operand_out(at::TensorList weight, const OperandFormats& formats,
                                 const QuantizedWeight& out, const std::optional<at::Tensor>& noop);

}  // namespace transformer_plugin::linear
