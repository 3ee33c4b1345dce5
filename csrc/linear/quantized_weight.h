// The list of tensors that quantize_weight returns and layers take: data, scale and, with NVFP4, amax of the rowwise weight, then
// of the columnwise one if the data gradient needs it (quantizes_weight_columnwise). bf16 has data only.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <vector>

#include "common/check.h"
#include "linear/operands.h"
#include "linear/weights.h"

namespace transformer_plugin::linear {

// Any float dtype, [N, K] or [G, N, K], or several matrices, with sizes that the format supports along rows and, with `columns`,
// along columns.
void check_unquantized_weight(const WeightArgument& weight, const OperandFormats& formats, bool columns);

// Checks the list `name` for a checked weight: number of tensors, contiguity, dtypes, sizes, device. With a meta tensor, as in a
// tracer, one or both directions are accepted. Several matrices are quantized into one stack.
void check_quantized_weight(const char* name, at::TensorList list, const WeightArgument& weight,
                            const OperandFormats& formats);
// The same for an argument of a layer; refused with the format "none".
void check_quantized_weight(const char* name, const OptionalList& given, const WeightArgument& weight,
                            const OperandFormats& formats);

std::vector<at::Tensor> as_list(const QuantizedWeight& weight, const OperandFormats& formats, bool columns);
// From a checked list. The operand of the data gradient is left out unless `backward`.
QuantizedWeight as_quantized_weight(at::TensorList list, const OperandFormats& formats, bool backward);
// The operand of a layer: the quantized weight if one is given, else the weight quantized now.
QuantizedWeight weight_operand(at::TensorList weight, const OptionalList& quantized,
                               const OperandFormats& formats, bool backward);
// The same of a weight that may be sharded over ranks: the operand of the forward is then gathered, that of the backward is this
// rank's part (whole_in_backward).
QuantizedWeight gathered_operand(at::TensorList weight, const OptionalList& quantized,
                                 const OperandFormats& formats, bool backward,
                                 const sharded::WeightShard& shard);
// In the backward: the operand of the data gradient, gathered again where the weight is sharded over ranks.
Quantized whole_in_backward(const sharded::WeightShard& shard, const Quantized& saved,
                            const OperandFormats& formats);
// The same where several matrices may be sharded: `matrices`, as saved, become those that the product reads, if any. `gathered`
// keeps them.
Quantized whole_in_backward(const sharded::WeightShard& shard, const Quantized& saved,
                            const OperandFormats& formats, at::TensorList& matrices,
                            std::vector<at::Tensor>& gathered);
// In a backward without a data gradient: asks another runtime for its weight all the same, so that it sees its order of use.
void announce_foreign_use(torch::autograd::AutogradContext* ctx, const char* main_grad,
                          const sharded::WeightShard& shard);

}  // namespace transformer_plugin::linear
