// Calls of the quantize ops through the dispatcher.
#pragma once

#include <string_view>
#include <tuple>

#include "common/ops/quantize.h"
#include "common/tensor.h"
#include "quantize/ops/directions.h"

namespace transformer_plugin::quantize {

inline Outputs call_quantize(const at::Tensor& x, std::string_view key, OptionalTensorArg group_sizes,
                             const Directions& directions, OptionalTensorArg amax = std::nullopt,
                             OptionalTensorArg amax_t = std::nullopt, OptionalTensorArg seed = std::nullopt,
                             OptionalTensorArg rows = std::nullopt, bool zero_tail = true) {
  return outputs_of(ops::quantize(x, key, group_sizes, amax, amax_t, seed, directions.rowwise,
                                  directions.columnwise, rows, zero_tail),
                    directions);
}

// Of the stack of the matrices, which is not made. `amax` [G], of NVFP4.
inline Outputs call_quantize_stack(at::TensorList matrices, std::string_view key,
                                   const Directions& directions, OptionalTensorArg amax) {
  return outputs_of(
      ops::quantize_list(matrices, key, amax, directions.rowwise, directions.columnwise, /*stacked=*/true),
      directions);
}

// The amaxes of both directions of matrices, into new tensors [G].
inline void call_amax_list_out(at::TensorList matrices, std::string_view key, const at::Tensor& amax,
                               OptionalTensorArg amax_t) {
  ops::amax_list_out(matrices, key, amax, amax_t, std::nullopt);
}

// Into buffers, for the directions whose buffers are defined.
inline void call_quantize_out(const at::Tensor& x, std::string_view key, Outputs&& out,
                              OptionalTensorArg amax, OptionalTensorArg amax_t, OptionalTensorArg seed,
                              OptionalTensorArg noop = std::nullopt) {
  const bool rowwise = out.data.defined(), columnwise = out.data_t.defined();
  ops::quantize_out(x, key, as_list(std::move(out)), std::nullopt, amax, amax_t, seed, noop, rowwise,
                    columnwise);
}

inline at::Tensor call_dequantize(const at::Tensor& data, const at::Tensor& scale_inv, std::string_view key,
                                  at::ScalarType dtype, OptionalTensorArg group_sizes, bool transposed,
                                  OptionalTensorArg amax, bool zero_tail = true) {
  return ops::dequantize(data, scale_inv, key, dtype, group_sizes, transposed, amax, zero_tail);
}

// The amaxes of the requested directions.
struct AmaxPair {
  at::Tensor amax, amax_t;
};

inline AmaxPair call_amax(const at::Tensor& x, std::string_view key, OptionalTensorArg group_sizes,
                          const Directions& directions) {
  Tensors list = ops::amax(x, key, group_sizes, directions.rowwise, directions.columnwise);
  AmaxPair result;
  if (directions.columnwise) result.amax_t = std::move(list.back());
  if (directions.rowwise) result.amax = std::move(list.front());
  return result;
}

// A quantized gradient, and the gradient of the bias.
struct BiasBackwardQuantized {
  Outputs values;
  at::Tensor bias;
};

inline BiasBackwardQuantized call_bias_backward_quantize(const at::Tensor& grad, std::string_view key,
                                                         OptionalTensorArg group_sizes,
                                                         const Directions& directions,
                                                         bool zero_tail = true) {
  const Tensors list =
      ops::bias_backward_quantize(grad, key, group_sizes, std::nullopt, std::nullopt, std::nullopt,
                                  directions.rowwise, directions.columnwise, zero_tail);
  return {outputs_of(list, directions), list.back()};
}

// Row-wise data to transposed data.
inline std::tuple<at::Tensor, at::Tensor> call_requantize_transposed(const at::Tensor& data,
                                                                     const at::Tensor& scale,
                                                                     std::string_view key,
                                                                     at::ScalarType dtype,
                                                                     OptionalTensorArg group_sizes) {
  return ops::requantize_transposed(data, scale, key, dtype, group_sizes, std::nullopt, std::nullopt,
                                    std::nullopt);
}

// With the encode scales of `scale` from `first` on. Tensors of a direction that is not requested are empty. The
// amax of `x` is combined into `amax` by a maximum.
inline Outputs call_quantize_scaled(const at::Tensor& x, const at::Tensor& scale, std::string_view key,
                                    OptionalTensorArg amax, OptionalTensorArg group_sizes, int64_t first,
                                    const Directions& directions) {
  auto [data, scale_inv, data_t, scale_t] = ops::quantize_scaled(x, scale, key, amax, group_sizes, first,
                                                                 directions.rowwise, directions.columnwise);
  return {std::move(data), std::move(scale_inv), std::move(data_t), std::move(scale_t)};
}

// The calls below are for formats with block scales: they pass no amax and no seed.

inline Outputs call_activation_quantize(const at::Tensor& input, std::string_view key,
                                        OptionalTensorArg probs, OptionalTensorArg group_sizes,
                                        const Directions& directions, std::string_view activation,
                                        bool zero_tail = true) {
  return outputs_of(
      ops::activation_quantize(input, key, probs, group_sizes, std::nullopt, std::nullopt, std::nullopt,
                               directions.rowwise, directions.columnwise, zero_tail, activation),
      directions);
}

// The quantized gradient of the input in both directions, and the gradient of the probabilities.
struct ActivationBackwardQuantized {
  Outputs values;
  at::Tensor probs;
};

inline ActivationBackwardQuantized call_activation_backward_quantize(
    const at::Tensor& grad, const at::Tensor& input, std::string_view key, OptionalTensorArg probs,
    OptionalTensorArg group_sizes, std::string_view activation, bool zero_tail = true) {
  const Tensors list = ops::activation_backward_quantize(grad, input, key, probs, group_sizes, std::nullopt,
                                                         std::nullopt, std::nullopt, zero_tail, activation);
  return {outputs_of(list, {true, true}), list.back()};
}

}  // namespace transformer_plugin::quantize
