// Calls of the activation ops through the dispatcher.
#pragma once

#include <tuple>

#include "common/tensor.h"

namespace transformer_plugin::activation {

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

}  // namespace transformer_plugin::activation
