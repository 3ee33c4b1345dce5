// Calls through the dispatcher to SwiGLU and the ops that round it in the pass that computes it.
#pragma once

#include <string_view>
#include <tuple>

#include "common/tensor.h"
#include "gemm/calls.h"

namespace transformer_plugin::gemm {

inline at::Tensor call_swiglu(const at::Tensor& input, OptionalTensorArg probs) {
  static const auto op = find_op<at::Tensor(const at::Tensor&, OptionalTensorArg)>("swiglu");
  return op.call(input, probs);
}

inline std::tuple<at::Tensor, at::Tensor> call_swiglu_backward(const at::Tensor& grad,
                                                               const at::Tensor& input,
                                                               OptionalTensorArg probs) {
  using Signature =
      std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, OptionalTensorArg);
  static const auto op = find_op<Signature>("swiglu_backward");
  return op.call(grad, input, probs);
}

// Of formats that find their scales in blocks: no amax is given, and no seed.

inline quantize_call::Pair call_swiglu_quantize(const at::Tensor& input, OptionalTensorArg probs,
                                                OptionalTensorArg group_sizes, std::string_view key) {
  using Signature = quantize_call::Pair(const at::Tensor&, OptionalTensorArg, OptionalTensorArg,
                                        std::string_view, OptionalTensorArg, OptionalTensorArg);
  static const auto op = find_op<Signature>("swiglu_quantize");
  return op.call(input, probs, group_sizes, key, std::nullopt, std::nullopt);
}

inline quantize_call::Four call_swiglu_quantize_both(const at::Tensor& input, OptionalTensorArg probs,
                                                     OptionalTensorArg group_sizes, std::string_view key) {
  using Signature =
      quantize_call::Four(const at::Tensor&, OptionalTensorArg, OptionalTensorArg, std::string_view,
                          OptionalTensorArg, OptionalTensorArg, OptionalTensorArg);
  static const auto op = find_op<Signature>("swiglu_quantize_both");
  return op.call(input, probs, group_sizes, key, std::nullopt, std::nullopt, std::nullopt);
}

// Data and scales along rows, along columns, and the gradient of the probabilities.
using SwigluBackwardQuantized = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

inline SwigluBackwardQuantized call_swiglu_backward_quantize_both(const at::Tensor& grad,
                                                                  const at::Tensor& input,
                                                                  OptionalTensorArg probs,
                                                                  OptionalTensorArg group_sizes,
                                                                  std::string_view key) {
  using Signature =
      SwigluBackwardQuantized(const at::Tensor&, const at::Tensor&, OptionalTensorArg, OptionalTensorArg,
                              std::string_view, OptionalTensorArg, OptionalTensorArg, OptionalTensorArg);
  static const auto op = find_op<Signature>("swiglu_backward_quantize_both");
  return op.call(grad, input, probs, group_sizes, key, std::nullopt, std::nullopt, std::nullopt);
}

}  // namespace transformer_plugin::gemm
