// Handles of the ops of activation. Written by build_tools/op_handles.py from registration.cpp.
// clang-format off
#pragma once

#include "common/op.h"

namespace transformer_plugin::ops {

inline constexpr Op<"activation", Tensor(const Tensor& input, OptionalTensorArg probs, OptionalTensorArg group_sizes,
    std::string_view activation)> activation;
inline constexpr Op<"activation_backward", std::tuple<Tensor, Tensor>(const Tensor& grad, const Tensor& input,
    OptionalTensorArg probs, OptionalTensorArg group_sizes, std::string_view activation)> activation_backward;

}  // namespace transformer_plugin::ops
