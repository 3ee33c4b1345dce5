// Handles of the ops of common. Written by build_tools/op_handles.py from registration.cpp.
// clang-format off
#pragma once

#include "common/op.h"

namespace transformer_plugin::ops {

inline constexpr Op<"connect_gradient", void(const Tensor& value, const Tensor& source)> connect_gradient;
inline constexpr Op<"check_group_sizes", void()> check_group_sizes;

}  // namespace transformer_plugin::ops
