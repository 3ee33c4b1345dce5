// Handles of the ops of gemm. Written by build_tools/op_handles.py from registration.cpp.
// clang-format off
#pragma once

#include "common/op.h"

namespace transformer_plugin::ops {

inline constexpr Op<"gemm", Tensor(const Tensor& a, const Tensor& b, OptionalTensorArg bias, bool transpose_b,
    std::optional<ScalarType> dtype, OptionalTensorArg alpha, std::optional<TensorList> a_scale,
    std::optional<TensorList> b_scale, std::string_view a_format, std::string_view b_format)> gemm;
inline constexpr Op<"gemm_out", void(const Tensor& a, const Tensor& b, const Tensor& out, OptionalTensorArg bias,
    bool transpose_b, OptionalTensorArg alpha, OptionalTensorArg beta, std::optional<TensorList> a_scale,
    std::optional<TensorList> b_scale, std::string_view a_format, std::string_view b_format, bool accumulate)> gemm_out;
inline constexpr Op<"grouped_gemm", Tensor(const Tensor& a, TensorList b, const Tensor& group_sizes, OptionalTensorArg bias,
    OptionalTensorArg bias_scale, bool transpose_b, std::optional<ScalarType> dtype, OptionalTensorArg alpha,
    OptionalTensorArg rows, int64_t max_sms, int64_t expected_rows, std::optional<TensorList> a_scale,
    std::optional<TensorList> b_scale, std::string_view a_format, std::string_view b_format, bool zero_tail)> grouped_gemm;
inline constexpr Op<"grouped_gemm_out", void(const Tensor& a, TensorList b, const Tensor& group_sizes, const Tensor& out,
    OptionalTensorArg bias, OptionalTensorArg bias_scale, bool transpose_b, OptionalTensorArg alpha, OptionalTensorArg beta,
    OptionalTensorArg rows, int64_t max_sms, int64_t expected_rows, std::optional<TensorList> a_scale,
    std::optional<TensorList> b_scale, std::string_view a_format, std::string_view b_format)> grouped_gemm_out;
inline constexpr Op<"gather_rows_backward", Tensor(const Tensor& grad, const Tensor& rows, const Tensor& group_sizes,
    SymInt num_rows)> gather_rows_backward;
inline constexpr Op<"grouped_gemm_wgrad", Tensor(const Tensor& grad, const Tensor& input, const Tensor& group_sizes,
    std::optional<ScalarType> dtype, OptionalTensorArg alpha, OptionalTensorArg input_rows, OptionalTensorArg grad_rows,
    int64_t max_sms, int64_t expected_rows, std::optional<TensorList> grad_scale, std::optional<TensorList> input_scale,
    std::string_view grad_format, std::string_view input_format)> grouped_gemm_wgrad;
inline constexpr Op<"grouped_gemm_wgrad_out", void(const Tensor& grad, const Tensor& input, const Tensor& group_sizes,
    TensorList out, bool accumulate, OptionalTensorArg alpha, OptionalTensorArg beta, OptionalTensorArg input_rows,
    OptionalTensorArg grad_rows, int64_t max_sms, int64_t expected_rows, std::optional<TensorList> grad_scale,
    std::optional<TensorList> input_scale, std::string_view grad_format, std::string_view input_format)> grouped_gemm_wgrad_out;
inline constexpr Op<"grouped_gemm_activation", std::tuple<Tensor, Tensor>(const Tensor& a, const Tensor& b,
    const Tensor& group_sizes, OptionalTensorArg probs, OptionalTensorArg bias, std::string_view activation, bool keep_input,
    int64_t max_sms, int64_t expected_rows, OptionalTensorArg rows, bool zero_tail)> grouped_gemm_activation;
inline constexpr Op<"grouped_gemm_activation_quantize", std::tuple<Tensor, Tensor, Tensor>(const Tensor& a, const Tensor& b,
    const Tensor& group_sizes, std::string_view format, OptionalTensorArg probs, OptionalTensorArg bias,
    std::string_view activation, bool keep_input, int64_t max_sms, int64_t expected_rows)> grouped_gemm_activation_quantize;
inline constexpr Op<"grouped_gemm_plan", std::tuple<std::string, std::string, std::vector<int64_t>>(std::string_view product,
    std::string_view a_format, std::string_view b_format, ScalarType dtype, ScalarType out_dtype, int64_t rows, int64_t groups,
    int64_t n, int64_t k, int64_t multiprocessors, int64_t capability, bool accumulate, int64_t max_sms,
    int64_t expected_rows)> grouped_gemm_plan;
inline constexpr Op<"bias_backward", Tensor(const Tensor& grad)> bias_backward;
inline constexpr Op<"grouped_bias_backward", std::tuple<Tensor, Tensor>(const Tensor& grad, const Tensor& group_sizes,
    OptionalTensorArg bias, OptionalTensorArg bias_scale)> grouped_bias_backward;

}  // namespace transformer_plugin::ops
