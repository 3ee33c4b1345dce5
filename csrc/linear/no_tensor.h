// An optional tensor that is not there, for references to one.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace transformer_plugin::linear {

inline const std::optional<at::Tensor> kNoTensor = std::nullopt;

}  // namespace transformer_plugin::linear
