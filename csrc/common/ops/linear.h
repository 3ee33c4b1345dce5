// Handles of the ops of linear. Written by build_tools/op_handles.py from registration.cpp.
// clang-format off
#pragma once

#include "common/op.h"

namespace transformer_plugin::ops {

inline constexpr Op<"linear", Tensor(const Tensor& input, const Tensor& weight, OptionalTensorArg bias,
    std::string_view input_format, std::string_view weight_format, std::string_view grad_format,
    std::optional<TensorList> quantized_weight, OptionalTensorArg main_grad, bool accumulate, std::string_view weight_grad,
    OptionalTensorArg wgrad_queue, bool save_original_input, OptionalTensorArg dgrad_out, std::string_view weight_shard,
    int64_t sequence_parallel_size, std::string_view sequence_parallel_group)> linear;
inline constexpr Op<"linear_out", void(const Tensor& input, const Tensor& weight, const Tensor& out, OptionalTensorArg bias,
    std::string_view input_format, std::string_view weight_format, std::string_view grad_format,
    std::optional<TensorList> quantized_weight, OptionalTensorArg main_grad, bool accumulate, std::string_view weight_grad,
    OptionalTensorArg wgrad_queue, bool save_original_input, OptionalTensorArg dgrad_out)> linear_out;
inline constexpr Op<"norm_linear", std::tuple<Tensor, Tensor>(const Tensor& input, OptionalTensorArg norm_weight,
    OptionalTensorArg norm_bias, const Tensor& weight, OptionalTensorArg bias, double eps, std::string_view normalization,
    bool zero_centered, bool return_normalized, std::string_view input_format, std::string_view weight_format,
    std::string_view grad_format, std::optional<TensorList> quantized_weight, OptionalTensorArg main_grad, bool accumulate,
    std::string_view weight_grad, OptionalTensorArg wgrad_queue, std::string_view weight_shard)> norm_linear;
inline constexpr Op<"grouped_linear", Tensor(const Tensor& input, TensorList weight, const Tensor& group_sizes,
    OptionalTensorArg bias, OptionalTensorArg bias_scale, std::string_view input_format, std::string_view weight_format,
    std::string_view grad_format, std::optional<TensorList> quantized_weight, int64_t max_sms, int64_t expected_rows,
    std::optional<TensorList> main_grad, bool accumulate, std::string_view weight_grad, OptionalTensorArg wgrad_queue,
    bool save_original_input, OptionalTensorArg dgrad_out, std::string_view weight_shard)> grouped_linear;
inline constexpr Op<"grouped_linear_out", void(const Tensor& input, TensorList weight, const Tensor& group_sizes,
    const Tensor& out, OptionalTensorArg bias, OptionalTensorArg bias_scale, std::string_view input_format,
    std::string_view weight_format, std::string_view grad_format, std::optional<TensorList> quantized_weight, int64_t max_sms,
    int64_t expected_rows, std::optional<TensorList> main_grad, bool accumulate, std::string_view weight_grad,
    OptionalTensorArg wgrad_queue, bool save_original_input, OptionalTensorArg dgrad_out)> grouped_linear_out;
inline constexpr Op<"grouped_mlp", Tensor(const Tensor& input, TensorList fc1_weight, TensorList fc2_weight,
    const Tensor& group_sizes, const Tensor& probs, OptionalTensorArg fc1_bias, OptionalTensorArg fc2_bias,
    std::string_view input_format, std::string_view weight_format, std::string_view grad_format,
    std::optional<TensorList> quantized_fc1_weight, std::optional<TensorList> quantized_fc2_weight, std::string_view activation,
    int64_t max_sms, int64_t expected_rows, std::optional<TensorList> fc1_main_grad, std::optional<TensorList> fc2_main_grad,
    bool accumulate, std::string_view weight_grad, OptionalTensorArg fc1_wgrad_queue, OptionalTensorArg fc2_wgrad_queue,
    OptionalTensorArg dgrad_out, OptionalTensorArg slot, OptionalTensorArg source, std::string_view weight_shard, bool over_ranks,
    std::string_view group_name, int64_t timeout_ms, OptionalTensorArg received, OptionalTensorArg position)> grouped_mlp;
inline constexpr Op<"grouped_mlp_out", void(const Tensor& input, TensorList fc1_weight, TensorList fc2_weight,
    const Tensor& group_sizes, const Tensor& probs, const Tensor& out, OptionalTensorArg fc1_bias, OptionalTensorArg fc2_bias,
    std::string_view input_format, std::string_view weight_format, std::string_view grad_format,
    std::optional<TensorList> quantized_fc1_weight, std::optional<TensorList> quantized_fc2_weight, std::string_view activation,
    int64_t max_sms, int64_t expected_rows, std::optional<TensorList> fc1_main_grad, std::optional<TensorList> fc2_main_grad,
    bool accumulate, std::string_view weight_grad, OptionalTensorArg fc1_wgrad_queue, OptionalTensorArg fc2_wgrad_queue,
    OptionalTensorArg dgrad_out, OptionalTensorArg slot, OptionalTensorArg source)> grouped_mlp_out;
inline constexpr Op<"new_wgrad_queue", int64_t()> new_wgrad_queue;
inline constexpr Op<"release_wgrad_queue", void(int64_t queue)> release_wgrad_queue;
inline constexpr Op<"count_deferred_wgrads", int64_t(int64_t queue)> count_deferred_wgrads;
inline constexpr Op<"defer_wgrad", void(const Tensor& queue, const Tensor& grad, const Tensor& input,
    OptionalTensorArg group_sizes, std::optional<TensorList> grad_scale, std::optional<TensorList> input_scale,
    std::string_view grad_format, std::string_view input_format, std::optional<ScalarType> dtype, bool accumulate,
    at::IntArrayRef skipped, int64_t max_sms, int64_t expected_rows, bool copy, OptionalTensorArg input_rows,
    OptionalTensorArg grad_rows)> defer_wgrad;
inline constexpr Op<"run_deferred_wgrads", void(const Tensor& queue, TensorList out, bool accumulate)> run_deferred_wgrads;
inline constexpr Op<"embedding", Tensor(const Tensor& indices, const Tensor& weight, int64_t padding_idx,
    std::string_view weight_shard)> embedding;
inline constexpr Op<"quantize_weight", std::vector<Tensor>(TensorList weight, std::string_view input_format,
    std::string_view weight_format, std::string_view grad_format)> quantize_weight;
inline constexpr Op<"quantize_weight_out", void(TensorList weight, std::string_view input_format, std::string_view weight_format,
    std::string_view grad_format, TensorList out, OptionalTensorArg noop)> quantize_weight_out;
inline constexpr Op<"linear.scaled", Tensor(const Tensor& input, const Tensor& weight, const Tensor& scale,
    OptionalTensorArg amax, OptionalTensorArg bias, std::string_view input_format, std::string_view weight_format,
    std::string_view grad_format, std::string_view weight_shard)> linear_scaled;
inline constexpr Op<"grouped_linear.scaled", Tensor(const Tensor& input, const Tensor& weight, const Tensor& group_sizes,
    const Tensor& scale, OptionalTensorArg amax, OptionalTensorArg bias, OptionalTensorArg bias_scale,
    std::string_view input_format, std::string_view weight_format, std::string_view grad_format, int64_t max_sms,
    int64_t expected_rows, std::string_view weight_shard)> grouped_linear_scaled;

}  // namespace transformer_plugin::ops
