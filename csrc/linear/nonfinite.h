// The option `nan` of format keys: an operand that holds a NaN or an infinity counts as NaN in all of its products.
// Quantizing knows nothing of it; layers make what the values are scaled by NaN, and of bf16 the values. A factor on the
// device, so no host reads it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace transformer_plugin::gemm {

bool marks_nonfinite(std::string_view key);
// Float32, without dimensions, on the device of `x`: 1, or NaN if `x` holds a NaN or an infinity; of ragged rows those of
// its groups.
at::Tensor nonfinite_mark(const at::Tensor& x, const std::optional<at::Tensor>& group_sizes);

}  // namespace transformer_plugin::gemm
