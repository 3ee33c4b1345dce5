// Calls of the norm ops through the dispatcher.
#pragma once

#include <string_view>
#include <tuple>

#include "common/tensor.h"
#include "norm/norm_call.h"

namespace transformer_plugin::norm {

using Two = std::tuple<at::Tensor, at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Four = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

inline at::Tensor call_rms_norm(const at::Tensor& input, const OptionalTensor& weight, double eps,
                                bool zero_centered) {
  using Signature = at::Tensor(const at::Tensor&, const OptionalTensor&, double, bool);
  static const auto op = find_op<Signature>("rms_norm");
  return op.call(input, weight, eps, zero_centered);
}

inline at::Tensor call_layer_norm(const at::Tensor& input, const OptionalTensor& weight,
                                  const OptionalTensor& bias, double eps, bool zero_centered) {
  using Signature = at::Tensor(const at::Tensor&, const OptionalTensor&, const OptionalTensor&, double, bool);
  static const auto op = find_op<Signature>("layer_norm");
  return op.call(input, weight, bias, eps, zero_centered);
}

inline Two call_rms_norm_forward(const at::Tensor& input, const OptionalTensor& weight, double eps,
                                 bool zero_centered) {
  using Signature = Two(const at::Tensor&, const OptionalTensor&, double, bool);
  static const auto op = find_op<Signature>("rms_norm_forward");
  return op.call(input, weight, eps, zero_centered);
}

inline Three call_layer_norm_forward(const at::Tensor& input, const OptionalTensor& weight,
                                     const OptionalTensor& bias, double eps, bool zero_centered) {
  using Signature = Three(const at::Tensor&, const OptionalTensor&, const OptionalTensor&, double, bool);
  static const auto op = find_op<Signature>("layer_norm_forward");
  return op.call(input, weight, bias, eps, zero_centered);
}

inline Two call_rms_norm_backward(const at::Tensor& grad, const at::Tensor& input,
                                  const OptionalTensor& weight, const at::Tensor& rstd, bool zero_centered) {
  using Signature = Two(const at::Tensor&, const at::Tensor&, const OptionalTensor&, const at::Tensor&, bool);
  static const auto op = find_op<Signature>("rms_norm_backward");
  return op.call(grad, input, weight, rstd, zero_centered);
}

inline Three call_layer_norm_backward(const at::Tensor& grad, const at::Tensor& input,
                                      const OptionalTensor& weight, const at::Tensor& mean,
                                      const at::Tensor& rstd, bool zero_centered, bool has_bias) {
  using Signature = Three(const at::Tensor&, const at::Tensor&, const OptionalTensor&, const at::Tensor&,
                          const at::Tensor&, bool, bool);
  static const auto op = find_op<Signature>("layer_norm_backward");
  return op.call(grad, input, weight, mean, rstd, zero_centered, has_bias);
}

// The calls below are of the norm that `call` describes.

inline at::Tensor call_norm(const NormCall& call) {
  return call.centered ? call_layer_norm(call.input, call.weight, call.bias, call.eps, call.zero_centered)
                       : call_rms_norm(call.input, call.weight, call.eps, call.zero_centered);
}

struct NormWithStats {
  at::Tensor output;
  Stats stats;
};

inline NormWithStats call_norm_forward(const NormCall& call) {
  if (call.centered) {
    auto [output, mean, rstd] =
        call_layer_norm_forward(call.input, call.weight, call.bias, call.eps, call.zero_centered);
    return {std::move(output), {std::move(mean), std::move(rstd)}};
  }
  auto [output, rstd] = call_rms_norm_forward(call.input, call.weight, call.eps, call.zero_centered);
  return {std::move(output), {at::Tensor(), std::move(rstd)}};
}

// In a format with block scales: without an amax and a seed.
struct NormInBlocks {
  at::Tensor data, scale;
  Stats stats;
};

inline NormInBlocks call_norm_quantize(const NormCall& call, std::string_view key) {
  if (call.centered) {
    using Signature = Four(const at::Tensor&, const OptionalTensor&, const OptionalTensor&, double,
                           std::string_view, bool, OptionalTensorArg, OptionalTensorArg);
    static const auto op = find_op<Signature>("layer_norm_quantize");
    auto [data, scale, mean, rstd] = op.call(call.input, call.weight, call.bias, call.eps, key,
                                             call.zero_centered, std::nullopt, std::nullopt);
    return {std::move(data), std::move(scale), {std::move(mean), std::move(rstd)}};
  }
  using Signature = Three(const at::Tensor&, const OptionalTensor&, double, std::string_view, bool,
                          OptionalTensorArg, OptionalTensorArg);
  static const auto op = find_op<Signature>("rms_norm_quantize");
  auto [data, scale, rstd] =
      op.call(call.input, call.weight, call.eps, key, call.zero_centered, std::nullopt, std::nullopt);
  return {std::move(data), std::move(scale), {at::Tensor(), std::move(rstd)}};
}

// Gradients of input, weight and bias; those of parameters that are not there have no elements.
inline Three call_norm_backward(const at::Tensor& grad, const NormCall& call, const Stats& stats,
                                bool has_bias) {
  if (call.centered) {
    return call_layer_norm_backward(grad, call.input, call.weight, stats.mean, stats.rstd, call.zero_centered,
                                    has_bias);
  }
  auto [input, weight] =
      call_rms_norm_backward(grad, call.input, call.weight, stats.rstd, call.zero_centered);
  return {std::move(input), std::move(weight), at::Tensor()};
}

}  // namespace transformer_plugin::norm
