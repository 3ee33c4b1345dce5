// Calls of the gemm ops through the dispatcher, and what their gradients share.
#pragma once

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "common/autograd.h"
#include "common/ops/gemm.h"
#include "common/quantized.h"
#include "common/tensor.h"
#include "gemm/args/launch_options.h"
#include "gemm/generic/dense_gemm.h"

namespace transformer_plugin::gemm {

// The scales and format keys of quantized operands; none of the default.
struct QuantizedKeys {
  OptionalList a_scale = {}, b_scale = {};
  std::string_view a = "none", b = "none";
};

inline at::Tensor call_gemm(const at::Tensor& a, const at::Tensor& b, OptionalTensorArg bias,
                            bool transpose_b, std::optional<at::ScalarType> dtype,
                            OptionalTensorArg alpha = std::nullopt, const QuantizedKeys& keys = {}) {
  return ops::gemm(a, b, bias, transpose_b, dtype, alpha, keys.a_scale, keys.b_scale, keys.a, keys.b);
}

inline void call_gemm_out(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out, bool transpose_b,
                          bool accumulate, const QuantizedKeys& keys = {},
                          OptionalTensorArg bias = std::nullopt) {
  ops::gemm_out(a, b, out, bias, transpose_b, std::nullopt, std::nullopt, keys.a_scale, keys.b_scale, keys.a,
                keys.b, accumulate);
}

// `b`: one tensor [G, .., ..], or a matrix for each group.
inline void call_grouped_gemm_out(const at::Tensor& a, at::TensorList b, const at::Tensor& group_sizes,
                                  const at::Tensor& out, OptionalTensorArg bias, OptionalTensorArg bias_scale,
                                  bool transpose_b, LaunchOptions options, const QuantizedKeys& keys) {
  ops::grouped_gemm_out(a, b, group_sizes, out, bias, bias_scale, transpose_b, std::nullopt, std::nullopt,
                        std::nullopt, options.max_sms, options.expected_rows, keys.a_scale, keys.b_scale,
                        keys.a, keys.b);
}

// The operands of a weight gradient of groups.
struct GroupedWgradCall {
  const at::Tensor &grad, &input, &group_sizes;
  std::optional<at::Tensor> grad_rows = std::nullopt, input_rows = std::nullopt;
  LaunchOptions options = {};
  QuantizedKeys keys = {};
};

inline at::Tensor call_grouped_gemm_wgrad(const GroupedWgradCall& call, std::optional<at::ScalarType> dtype,
                                          OptionalTensorArg alpha = std::nullopt) {
  return ops::grouped_gemm_wgrad(call.grad, call.input, call.group_sizes, dtype, alpha, call.input_rows,
                                 call.grad_rows, call.options.max_sms, call.options.expected_rows,
                                 call.keys.a_scale, call.keys.b_scale, call.keys.a, call.keys.b);
}

// `out`: one tensor [G, N, K], or a matrix for each group.
inline void call_grouped_gemm_wgrad_out(const GroupedWgradCall& call, at::TensorList out, bool accumulate) {
  ops::grouped_gemm_wgrad_out(call.grad, call.input, call.group_sizes, out, accumulate, std::nullopt,
                              std::nullopt, call.input_rows, call.grad_rows, call.options.max_sms,
                              call.options.expected_rows, call.keys.a_scale, call.keys.b_scale, call.keys.a,
                              call.keys.b);
}

// A gradient and an operand in one dtype: unchanged, or both converted without loss if they differ.
inline std::pair<at::Tensor, at::Tensor> same_dtype(const at::Tensor& grad, const at::Tensor& operand) {
  if (grad.scalar_type() == operand.scalar_type()) return {grad, operand};
  const at::ScalarType wide = sum_dtype(operand.scalar_type());
  return {grad.to(wide), operand.to(wide)};
}

// Saves the launch options of a call; only those that are set, as each entry costs host time.
inline void save_options(torch::autograd::AutogradContext* ctx, const LaunchOptions& options) {
  if (options.max_sms > 0) ctx->saved_data["max_sms"] = options.max_sms;
  if (options.expected_rows >= 0) ctx->saved_data["expected_rows"] = options.expected_rows;
}
inline LaunchOptions saved_options(const torch::autograd::AutogradContext* ctx) {
  const auto max_sms = ctx->saved_data.find("max_sms"), expected = ctx->saved_data.find("expected_rows");
  LaunchOptions options;
  if (max_sms != ctx->saved_data.end()) options.max_sms = max_sms->second.toInt();
  if (expected != ctx->saved_data.end()) options.expected_rows = expected->second.toInt();
  return options;
}

// The gradients of the bias and its scale. `place`: the index of the bias among the node's tensor arguments. `bias` is saved if
// the gradient of its scale is needed.
inline std::pair<at::Tensor, at::Tensor> bias_gradients(const torch::autograd::AutogradContext* ctx,
                                                        bool has_bias, const at::Tensor& grad,
                                                        const at::Tensor& group_sizes, const at::Tensor& bias,
                                                        const at::Tensor& bias_scale, size_t place = 3) {
  const bool needs_bias_grad = has_bias && ctx->needs_input_grad(place);
  const bool needs_scale_grad = has_bias && bias_scale.defined() && ctx->needs_input_grad(place + 1);
  if (!needs_bias_grad && !needs_scale_grad) return {};
  const auto [grad_bias, grad_scale] = ops::grouped_bias_backward(
      grad, group_sizes, needs_scale_grad ? as_optional(bias) : std::nullopt, as_optional(bias_scale));
  return {needs_bias_grad ? grad_bias : at::Tensor(), needs_scale_grad ? grad_scale : at::Tensor()};
}

}  // namespace transformer_plugin::gemm
