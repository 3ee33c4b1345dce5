#include "linear/grouped_mlp_activation.h"

#include "activation/calls.h"
#include "gemm/ops/calls.h"
#include "linear/nonfinite.h"
#include "linear/quantized_weight.h"
#include "quantize/ops/calls.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;

// The scales of blocks are found in a tile. One scale for a whole matrix, and the amax of nvfp4, need all of the matrix
// before its first element is rounded, so there the steps are done one by one.
bool rounds_in_tiles(const Format& format, std::string_view key) {
  return format.has_blocks() && !format.is_nv() && !marks_nonfinite(key);
}

// The gradient's two halves must begin on a tile. Where a bias wants its sums, they are of what is not rounded.
bool rounds_gradient_in_tiles(const Tensor& linear, const RoleFormats& formats, const HiddenWanted& wanted) {
  constexpr int64_t kTwoTiles = 256;
  const c10::SymInt columns = linear.sym_size(1);
  return rounds_in_tiles(formats.grad, formats.grad_key) && (wanted.input || wanted.weight) && !wanted.bias &&
         columns > 0 && columns % kTwoTiles == 0;
}

// Whether a product of these values with a SwiGLU beside it is one op: without scales, in the dtype of the layer.
bool multiplies_as_they_are(const Scaled& values, const Scaled& weight, at::ScalarType dtype) {
  return !values.scale.defined() && values.data.scalar_type() == dtype && weight.data.scalar_type() == dtype;
}

}  // namespace

Rounded round_role(const Tensor& x, const Tensor& group_sizes, const Format& format, std::string_view key,
                   bool rows, bool columns) {
  if (format.family == FormatFamily::kNone) {
    return {{x, Tensor(), Tensor()}, {x.t(), Tensor(), Tensor()}};
  }
  return round_matrix(x, group_sizes, format, key, rows, columns);
}

RoundedWeight round_role_weight(const Tensor& weight, const OptionalList& quantized,
                                const RoleFormats& formats, bool backward) {
  if (quantized) return as_rounded_weight(*quantized, formats, backward);
  if (!formats.native()) return round_weight(weight, formats, backward);
  const Scaled as_it_is{weight, Tensor(), Tensor()};
  return {as_it_is, backward ? as_it_is : Scaled{}};
}

Hidden product_then_activation(Rounded input, RoundedWeight weight, const MlpArguments& mlp,
                               const RoleFormats& formats, bool columns, bool keep_linear) {
  Hidden hidden;
  if (multiplies_as_they_are(input.rows, weight.forward, mlp.input.scalar_type())) {
    Tensor activation;
    std::tie(activation, hidden.linear) =
        call_grouped_gemm_swiglu(input.rows.data, weight.forward.data, mlp.group_sizes, mlp.probs,
                                 mlp.fc1_bias, /*interleave=*/0, /*keep_input=*/keep_linear);
    hidden.activation =
        round_role(activation, mlp.group_sizes, formats.input, formats.input_key, true, columns);
    return hidden;
  }
  hidden.linear = multiply({input.rows, formats.input_key}, {weight.forward, formats.weight_key},
                           mlp.group_sizes, mlp.fc1_bias, std::nullopt, true, mlp.input.scalar_type());
  input = {};
  weight = {};
  if (!rounds_in_tiles(formats.input, formats.input_key)) {
    hidden.activation = round_role(activation::call_swiglu(hidden.linear, mlp.probs), mlp.group_sizes,
                                   formats.input, formats.input_key, true, columns);
    return hidden;
  }
  auto& [row, column] = hidden.activation;
  if (columns) {
    std::tie(row.data, row.scale, column.data, column.scale) =
        quantize::call_swiglu_quantize_both(hidden.linear, mlp.probs, mlp.group_sizes, formats.input_key);
  } else {
    std::tie(row.data, row.scale) =
        quantize::call_swiglu_quantize(hidden.linear, mlp.probs, mlp.group_sizes, formats.input_key);
  }
  return hidden;
}

namespace {

RoundedGradient round_hidden_gradient(const Tensor& grad, const Tensor& group_sizes,
                                      const RoleFormats& formats, const HiddenWanted& wanted) {
  RoundedGradient result;
  if (formats.native()) {
    result.values = round_role(grad, group_sizes, formats.grad, formats.grad_key, true, true);
  } else if (wanted.input || wanted.weight) {
    result = round_gradient(grad, group_sizes, formats.grad, formats.grad_key, wanted.input, wanted.weight,
                            wanted.bias);
  }
  if (wanted.bias && !result.bias.defined()) {
    std::tie(result.bias, std::ignore) =
        call_grouped_bias_backward(grad, group_sizes, std::nullopt, std::nullopt);
  }
  return result;
}

}  // namespace

// Two steps in every format: a product with the gradient of SwiGLU in its epilogue, grouped_gemm_swiglu_backward, holds less
// but takes longer.
HiddenGradient data_gradient_then_activation_backward(Scaled grad, const Scaled& weight, bool transpose_b,
                                                      const Tensor& linear, const Tensor& group_sizes,
                                                      const Tensor& probs, const RoleFormats& formats,
                                                      const HiddenWanted& wanted) {
  const std::string_view key = formats.grad_key;
  Tensor grad_activation = multiply({grad, key}, {weight, formats.weight_key}, group_sizes, std::nullopt,
                                    std::nullopt, transpose_b, linear.scalar_type());
  grad = {};
  HiddenGradient result;
  if (rounds_gradient_in_tiles(linear, formats, wanted)) {
    auto& [row, column] = result.linear.values;
    std::tie(row.data, row.scale, column.data, column.scale, result.probs) =
        quantize::call_swiglu_backward_quantize_both(grad_activation, linear, probs, group_sizes, key);
    return result;
  }
  Tensor grad_linear;
  std::tie(grad_linear, result.probs) = activation::call_swiglu_backward(grad_activation, linear, probs);
  grad_activation.reset();
  result.linear = round_hidden_gradient(grad_linear, group_sizes, formats, wanted);
  return result;
}

}  // namespace transformer_plugin::gemm
