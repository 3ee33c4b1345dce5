// Handles of the ops of norm. Written by build_tools/op_handles.py from registration.cpp.
// clang-format off
#pragma once

#include "common/op.h"

namespace transformer_plugin::ops {

inline constexpr Op<"rms_norm", Tensor(const Tensor& input, OptionalTensorArg weight, double eps, bool zero_centered)> rms_norm;
inline constexpr Op<"rms_norm_forward", std::tuple<Tensor, Tensor>(const Tensor& input, OptionalTensorArg weight, double eps,
    bool zero_centered)> rms_norm_forward;
inline constexpr Op<"rms_norm_backward", std::tuple<Tensor, Tensor>(const Tensor& grad, const Tensor& input,
    OptionalTensorArg weight, const Tensor& rstd, bool zero_centered)> rms_norm_backward;
inline constexpr Op<"rms_norm_quantize", std::tuple<Tensor, Tensor, Tensor>(const Tensor& input, OptionalTensorArg weight,
    double eps, std::string_view format, bool zero_centered, OptionalTensorArg amax, OptionalTensorArg seed)> rms_norm_quantize;
inline constexpr Op<"layer_norm", Tensor(const Tensor& input, OptionalTensorArg weight, OptionalTensorArg bias, double eps,
    bool zero_centered)> layer_norm;
inline constexpr Op<"layer_norm_forward", std::tuple<Tensor, Tensor, Tensor>(const Tensor& input, OptionalTensorArg weight,
    OptionalTensorArg bias, double eps, bool zero_centered)> layer_norm_forward;
inline constexpr Op<"layer_norm_backward", std::tuple<Tensor, Tensor, Tensor>(const Tensor& grad, const Tensor& input,
    OptionalTensorArg weight, const Tensor& mean, const Tensor& rstd, bool zero_centered, bool has_bias)> layer_norm_backward;
inline constexpr Op<"layer_norm_quantize", std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor& input,
    OptionalTensorArg weight, OptionalTensorArg bias, double eps, std::string_view format, bool zero_centered,
    OptionalTensorArg amax, OptionalTensorArg seed)> layer_norm_quantize;

}  // namespace transformer_plugin::ops
