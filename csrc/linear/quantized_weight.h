// Weights that are rounded beforehand: what quantize_weight makes, and what layers are given of it. As a list of tensors:
// data, scale and, of NVFP4, amax, along rows; then along columns, where the data gradient takes the weight so
// (rounds_weight_columns). bf16 has data alone.
#pragma once

#include <optional>
#include <vector>

#include "common/check.h"
#include "linear/operands.h"

namespace transformer_plugin::gemm {

using OptionalList = std::optional<at::TensorList>;

// Any float dtype, [N, K] or [G, N, K], of sizes that the format takes along rows and, with `columns`, along those.
void check_unquantized_weight(const Argument& weight, const RoleFormats& formats, bool columns);

// A list `name` for a checked weight: as many tensors as its format has, contiguous, with its dtypes and sizes, on the
// device of the weight. Of a tensor without a device, as tracers have them, either number of directions will do.
void check_quantized_weight(const char* name, at::TensorList list, const Argument& weight,
                            const RoleFormats& formats);
// The same of an argument of a layer, which formats that round nothing have no use for.
void check_quantized_weight(const char* name, const OptionalList& given, const Argument& weight,
                            const RoleFormats& formats);

std::vector<at::Tensor> as_list(const RoundedWeight& weight, const RoleFormats& formats, bool columns);
// Of a checked list. What is for the data gradient is left out unless `backward`.
RoundedWeight as_rounded_weight(at::TensorList list, const RoleFormats& formats, bool backward);

}  // namespace transformer_plugin::gemm
