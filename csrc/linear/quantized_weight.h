// The list of tensors that quantize_weight returns and layers take: data, scale and, with NVFP4, amax of the rowwise weight, then
// of the columnwise one if the data gradient needs it (quantizes_weight_columnwise). bf16 has data only.
#pragma once

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

}  // namespace transformer_plugin::linear
