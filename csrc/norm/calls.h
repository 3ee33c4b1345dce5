// Calls of the norm ops through the dispatcher.
#pragma once

#include <string_view>
#include <tuple>

#include "common/ops/norm.h"
#include "common/tensor.h"
#include "norm/norm_call.h"

namespace transformer_plugin::norm {

using Two = std::tuple<at::Tensor, at::Tensor>;
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// Of the norm that `call` describes.

inline at::Tensor call_norm(const NormCall& call) {
  return call.centered ? ops::layer_norm(call.input, call.weight, call.bias, call.eps, call.zero_centered)
                       : ops::rms_norm(call.input, call.weight, call.eps, call.zero_centered);
}

struct NormWithStats {
  at::Tensor output;
  Stats stats;
};

inline NormWithStats call_norm_forward(const NormCall& call) {
  if (call.centered) {
    auto [output, mean, rstd] =
        ops::layer_norm_forward(call.input, call.weight, call.bias, call.eps, call.zero_centered);
    return {std::move(output), {std::move(mean), std::move(rstd)}};
  }
  auto [output, rstd] = ops::rms_norm_forward(call.input, call.weight, call.eps, call.zero_centered);
  return {std::move(output), {at::Tensor(), std::move(rstd)}};
}

// In a format with block scales: without an amax and a seed.
struct NormInBlocks {
  at::Tensor data, scale;
  Stats stats;
};

inline NormInBlocks call_norm_quantize(const NormCall& call, std::string_view key) {
  if (call.centered) {
    auto [data, scale, mean, rstd] = ops::layer_norm_quantize(
        call.input, call.weight, call.bias, call.eps, key, call.zero_centered, std::nullopt, std::nullopt);
    return {std::move(data), std::move(scale), {std::move(mean), std::move(rstd)}};
  }
  auto [data, scale, rstd] = ops::rms_norm_quantize(call.input, call.weight, call.eps, key,
                                                    call.zero_centered, std::nullopt, std::nullopt);
  return {std::move(data), std::move(scale), {at::Tensor(), std::move(rstd)}};
}

// Gradients of input, weight and bias; those of parameters that are not there have no elements.
inline Three call_norm_backward(const at::Tensor& grad, const NormCall& call, const Stats& stats,
                                bool has_bias) {
  if (call.centered) {
    return ops::layer_norm_backward(grad, call.input, call.weight, stats.mean, stats.rstd, call.zero_centered,
                                    has_bias);
  }
  auto [input, weight] =
      ops::rms_norm_backward(grad, call.input, call.weight, stats.rstd, call.zero_centered);
  return {std::move(input), std::move(weight), at::Tensor()};
}

}  // namespace transformer_plugin::norm
