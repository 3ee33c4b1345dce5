// The option `nan` of format keys: an operand that holds a NaN or an infinity makes all of its products NaN. The quantize ops
// ignore it; layers multiply the scales, or the values of bf16, by a factor on the device, which no host reads.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace transformer_plugin::linear {

bool marks_nonfinite(std::string_view key);
// A float32 scalar tensor on the device of `x`: 1, or NaN if `x` holds a NaN or an infinity. Rows past the last group do not
// count.
at::Tensor nonfinite_factor(const at::Tensor& x, const std::optional<at::Tensor>& group_sizes);
// Of several tensors together.
at::Tensor nonfinite_factor(at::TensorList tensors);

}  // namespace transformer_plugin::linear
