// Handles of the ops of quantize. Written by build_tools/op_handles.py from registration.cpp.
// clang-format off
#pragma once

#include "common/op.h"

namespace transformer_plugin::ops {

inline constexpr Op<"quantize", std::vector<Tensor>(const Tensor& input, std::string_view format, OptionalTensorArg group_sizes,
    OptionalTensorArg amax, OptionalTensorArg amax_t, OptionalTensorArg seed, bool rowwise, bool columnwise,
    OptionalTensorArg rows, bool zero_tail)> quantize;
inline constexpr Op<"quantize_out", void(const Tensor& input, std::string_view format, TensorList out,
    OptionalTensorArg group_sizes, OptionalTensorArg amax, OptionalTensorArg amax_t, OptionalTensorArg seed,
    OptionalTensorArg noop, bool rowwise, bool columnwise)> quantize_out;
inline constexpr Op<"quantize_list", std::vector<Tensor>(TensorList inputs, std::string_view format, OptionalTensorArg amax,
    bool rowwise, bool columnwise, bool stacked)> quantize_list;
inline constexpr Op<"dequantize", Tensor(const Tensor& data, const Tensor& scale_inv, std::string_view format, ScalarType dtype,
    OptionalTensorArg group_sizes, bool transposed, OptionalTensorArg amax, bool zero_tail)> dequantize;
inline constexpr Op<"amax", std::vector<Tensor>(const Tensor& input, std::string_view format, OptionalTensorArg group_sizes,
    bool rowwise, bool columnwise)> amax;
inline constexpr Op<"amax_list_out", void(TensorList inputs, std::string_view format, const Tensor& amax,
    OptionalTensorArg amax_t, OptionalTensorArg noop)> amax_list_out;
inline constexpr Op<"requantize_transposed", std::tuple<Tensor, Tensor>(const Tensor& data, const Tensor& scale_inv,
    std::string_view format, ScalarType dtype, OptionalTensorArg group_sizes, OptionalTensorArg amax, OptionalTensorArg amax_t,
    OptionalTensorArg seed)> requantize_transposed;
inline constexpr Op<"quantize_scaled", std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor& input, const Tensor& scale,
    std::string_view format, OptionalTensorArg amax, OptionalTensorArg group_sizes, int64_t first, bool rowwise,
    bool columnwise)> quantize_scaled;
inline constexpr Op<"update_delayed_scale_", Tensor(const Tensor& history, const Tensor& scale, const Tensor& amax,
    const std::vector<std::string>& formats, int64_t margin, std::string_view algorithm,
    std::string_view group)> update_delayed_scale_;
inline constexpr Op<"delayed_scale", Tensor(const Tensor& history, const Tensor& scale, const Tensor& amax,
    const std::vector<std::string>& formats, int64_t margin, std::string_view algorithm)> delayed_scale;
inline constexpr Op<"activation_quantize", std::vector<Tensor>(const Tensor& input, std::string_view format,
    OptionalTensorArg probs, OptionalTensorArg group_sizes, OptionalTensorArg amax, OptionalTensorArg amax_t,
    OptionalTensorArg seed, bool rowwise, bool columnwise, bool zero_tail, std::string_view activation)> activation_quantize;
inline constexpr Op<"activation_backward_quantize", std::vector<Tensor>(const Tensor& grad, const Tensor& input,
    std::string_view format, OptionalTensorArg probs, OptionalTensorArg group_sizes, OptionalTensorArg amax,
    OptionalTensorArg amax_t, OptionalTensorArg seed, bool zero_tail, std::string_view activation)> activation_backward_quantize;
inline constexpr Op<"bias_backward_quantize", std::vector<Tensor>(const Tensor& grad, std::string_view format,
    OptionalTensorArg group_sizes, OptionalTensorArg amax, OptionalTensorArg amax_t, OptionalTensorArg seed, bool rowwise,
    bool columnwise, bool zero_tail)> bias_backward_quantize;

}  // namespace transformer_plugin::ops
