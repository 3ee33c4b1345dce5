// Calls of the activation ops through the dispatcher.
#pragma once

#include <tuple>

#include "common/tensor.h"

namespace transformer_plugin::activation {

inline at::Tensor call_swiglu(const at::Tensor& input, OptionalTensorArg probs,
                              OptionalTensorArg group_sizes = std::nullopt) {
  using Signature = at::Tensor(const at::Tensor&, OptionalTensorArg, OptionalTensorArg);
  static const auto op = find_op<Signature>("swiglu");
  return op.call(input, probs, group_sizes);
}

inline std::tuple<at::Tensor, at::Tensor> call_swiglu_backward(const at::Tensor& grad,
                                                               const at::Tensor& input,
                                                               OptionalTensorArg probs,
                                                               OptionalTensorArg group_sizes = std::nullopt) {
  using Signature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&,
                                                       OptionalTensorArg, OptionalTensorArg);
  static const auto op = find_op<Signature>("swiglu_backward");
  return op.call(grad, input, probs, group_sizes);
}

}  // namespace transformer_plugin::activation
