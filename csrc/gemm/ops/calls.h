// Calls of the gemm ops through the dispatcher, and what their gradients share.
#pragma once

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

inline at::Tensor call_grouped_gemm_wgrad(const at::Tensor& grad, const at::Tensor& input,
                                          const at::Tensor& group_sizes, std::optional<at::ScalarType> dtype,
                                          OptionalTensorArg alpha = std::nullopt,
                                          OptionalTensorArg input_rows = std::nullopt,
                                          LaunchOptions options = {}, const QuantizedKeys& keys = {},
                                          OptionalTensorArg grad_rows = std::nullopt) {
  return ops::grouped_gemm_wgrad(grad, input, group_sizes, dtype, alpha, input_rows, grad_rows,
                                 options.max_sms, options.expected_rows, keys.a_scale, keys.b_scale, keys.a,
                                 keys.b);
}

// `out`: one tensor [G, N, K], or a matrix for each group.
inline void call_grouped_gemm_wgrad_out(const at::Tensor& grad, const at::Tensor& input,
                                        const at::Tensor& group_sizes, at::TensorList out, bool accumulate,
                                        LaunchOptions options = {}, const QuantizedKeys& keys = {},
                                        OptionalTensorArg input_rows = std::nullopt,
                                        OptionalTensorArg grad_rows = std::nullopt) {
  ops::grouped_gemm_wgrad_out(grad, input, group_sizes, out, accumulate, std::nullopt, std::nullopt,
                              input_rows, grad_rows, options.max_sms, options.expected_rows, keys.a_scale,
                              keys.b_scale, keys.a, keys.b);
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
  const bool wants_bias = has_bias && ctx->needs_input_grad(place);
  const bool wants_scale = has_bias && bias_scale.defined() && ctx->needs_input_grad(place + 1);
  if (!wants_bias && !wants_scale) return {};
  const auto [grad_bias, grad_scale] = ops::grouped_bias_backward(
      grad, group_sizes, wants_scale ? as_optional(bias) : std::nullopt, as_optional(bias_scale));
  return {wants_bias ? grad_bias : at::Tensor(), wants_scale ? grad_scale : at::Tensor()};
}

}  // namespace transformer_plugin::gemm
