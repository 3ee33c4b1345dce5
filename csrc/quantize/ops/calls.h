// Calls of the quantize ops through the dispatcher.
#pragma once

#include <string_view>
#include <tuple>

#include "common/tensor.h"

namespace transformer_plugin::quantize {

// The grouped op is called if group sizes are given.

namespace quantize_call {
using Pair = std::tuple<at::Tensor, at::Tensor>;
using Four = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
template <typename Result>
using Dense = Result(const at::Tensor&, std::string_view, OptionalTensorArg, OptionalTensorArg);
template <typename Result>
using Grouped = Result(const at::Tensor&, const at::Tensor&, std::string_view, OptionalTensorArg,
                       OptionalTensorArg);
using DenseBoth = Four(const at::Tensor&, std::string_view, OptionalTensorArg, OptionalTensorArg,
                       OptionalTensorArg);
using GroupedBoth = Four(const at::Tensor&, const at::Tensor&, std::string_view, OptionalTensorArg,
                         OptionalTensorArg, OptionalTensorArg);
template <typename Result>
using Amax = Result(const at::Tensor&, std::string_view, OptionalTensorArg);
}  // namespace quantize_call

inline quantize_call::Pair call_quantize(const at::Tensor& x, OptionalTensorArg group_sizes,
                                         std::string_view key, OptionalTensorArg amax = std::nullopt,
                                         OptionalTensorArg seed = std::nullopt) {
  static const auto dense = find_op<quantize_call::Dense<quantize_call::Pair>>("quantize");
  static const auto grouped = find_op<quantize_call::Grouped<quantize_call::Pair>>("grouped_quantize");
  return group_sizes ? grouped.call(x, *group_sizes, key, amax, seed) : dense.call(x, key, amax, seed);
}

inline quantize_call::Pair call_quantize_transposed(const at::Tensor& x, OptionalTensorArg group_sizes,
                                                    std::string_view key,
                                                    OptionalTensorArg amax = std::nullopt,
                                                    OptionalTensorArg seed = std::nullopt) {
  static const auto dense = find_op<quantize_call::Dense<quantize_call::Pair>>("quantize_transposed");
  static const auto grouped =
      find_op<quantize_call::Grouped<quantize_call::Pair>>("grouped_quantize_transposed");
  return group_sizes ? grouped.call(x, *group_sizes, key, amax, seed) : dense.call(x, key, amax, seed);
}

inline quantize_call::Four call_quantize_both(const at::Tensor& x, OptionalTensorArg group_sizes,
                                              std::string_view key, OptionalTensorArg amax = std::nullopt,
                                              OptionalTensorArg amax_t = std::nullopt,
                                              OptionalTensorArg seed = std::nullopt) {
  static const auto dense = find_op<quantize_call::DenseBoth>("quantize_both");
  static const auto grouped = find_op<quantize_call::GroupedBoth>("grouped_quantize_both");
  return group_sizes ? grouped.call(x, *group_sizes, key, amax, amax_t, seed)
                     : dense.call(x, key, amax, amax_t, seed);
}

// Into buffers: along rows, and along columns if `data_t` is defined.
inline void call_quantize_out(const at::Tensor& x, std::string_view key, const at::Tensor& data,
                              const at::Tensor& scale, const at::Tensor& data_t, const at::Tensor& scale_t,
                              OptionalTensorArg amax, OptionalTensorArg amax_t, OptionalTensorArg seed) {
  using Tensor = at::Tensor;
  using One = void(const Tensor&, std::string_view, const Tensor&, const Tensor&, OptionalTensorArg,
                   OptionalTensorArg, OptionalTensorArg);
  using Both =
      void(const Tensor&, std::string_view, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
           OptionalTensorArg, OptionalTensorArg, OptionalTensorArg, OptionalTensorArg);
  static const auto one = find_op<One>("quantize_out");
  static const auto both = find_op<Both>("quantize_both_out");
  data_t.defined() ? both.call(x, key, data, scale, data_t, scale_t, amax, amax_t, seed, std::nullopt)
                   : one.call(x, key, data, scale, amax, seed, std::nullopt);
}

inline at::Tensor call_amax(const at::Tensor& x, OptionalTensorArg group_sizes, std::string_view key) {
  static const auto op = find_op<quantize_call::Amax<at::Tensor>>("amax");
  return op.call(x, key, group_sizes);
}

inline at::Tensor call_amax_transposed(const at::Tensor& x, OptionalTensorArg group_sizes,
                                       std::string_view key) {
  static const auto op = find_op<quantize_call::Amax<at::Tensor>>("amax_transposed");
  return op.call(x, key, group_sizes);
}

inline quantize_call::Pair call_amax_both(const at::Tensor& x, OptionalTensorArg group_sizes,
                                          std::string_view key) {
  static const auto op = find_op<quantize_call::Amax<quantize_call::Pair>>("amax_both");
  return op.call(x, key, group_sizes);
}

// A quantized gradient, along rows, columns or both, and the gradient of the bias.
struct BiasBackwardQuantized {
  at::Tensor data, scale, data_t, scale_t, bias;
};

inline BiasBackwardQuantized call_bias_backward_quantize(const at::Tensor& grad,
                                                         OptionalTensorArg group_sizes, std::string_view key,
                                                         bool rows, bool columns) {
  using Tensor = at::Tensor;
  using One = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, OptionalTensorArg, std::string_view,
                                                 OptionalTensorArg, OptionalTensorArg);
  using Both = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(const Tensor&, OptionalTensorArg,
                                                                  std::string_view, OptionalTensorArg,
                                                                  OptionalTensorArg, OptionalTensorArg);
  static const auto of_rows = find_op<One>("bias_backward_quantize");
  static const auto of_columns = find_op<One>("bias_backward_quantize_transposed");
  static const auto of_both = find_op<Both>("bias_backward_quantize_both");
  BiasBackwardQuantized r;
  if (rows && columns) {
    std::tie(r.data, r.scale, r.data_t, r.scale_t, r.bias) =
        of_both.call(grad, group_sizes, key, std::nullopt, std::nullopt, std::nullopt);
  } else if (rows) {
    std::tie(r.data, r.scale, r.bias) = of_rows.call(grad, group_sizes, key, std::nullopt, std::nullopt);
  } else {
    std::tie(r.data_t, r.scale_t, r.bias) =
        of_columns.call(grad, group_sizes, key, std::nullopt, std::nullopt);
  }
  return r;
}

// Row-wise data to transposed data.
inline quantize_call::Pair call_requantize_transposed(const at::Tensor& data, const at::Tensor& scale,
                                                      std::string_view key, at::ScalarType dtype,
                                                      OptionalTensorArg group_sizes) {
  using Signature =
      quantize_call::Pair(const at::Tensor&, const at::Tensor&, std::string_view, at::ScalarType,
                          OptionalTensorArg, OptionalTensorArg, OptionalTensorArg, OptionalTensorArg);
  static const auto op = find_op<Signature>("requantize_transposed");
  return op.call(data, scale, key, dtype, group_sizes, std::nullopt, std::nullopt, std::nullopt);
}

// With the encode scales of `scale` from `first` on. The amax of `x` is combined into `amax` by a maximum.
inline quantize_call::Pair call_quantize_scaled(const at::Tensor& x, OptionalTensorArg group_sizes,
                                                const at::Tensor& scale, std::string_view key,
                                                OptionalTensorArg amax, int64_t first) {
  using Signature = quantize_call::Pair(const at::Tensor&, const at::Tensor&, std::string_view,
                                        OptionalTensorArg, OptionalTensorArg, int64_t);
  static const auto op = find_op<Signature>("quantize_scaled");
  return op.call(x, scale, key, amax, group_sizes, first);
}

// The calls below are for formats with block scales: they pass no amax and no seed.

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

// Row-wise data and scales, transposed data and scales, and the gradient of the probabilities.
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

}  // namespace transformer_plugin::quantize
