#include "linear/grouped_mlp_activation.h"

#include "activation/calls.h"
#include "gemm/dispatch/swiglu_gemm.h"
#include "gemm/ops/calls.h"
#include "linear/nonfinite.h"
#include "linear/quantized_weight.h"
#include "quantize/ops/calls.h"

namespace transformer_plugin::linear {

using namespace gemm;  // layers are made of its ops and checks
namespace {

using at::Tensor;

// Block scales are computed within a tile. A scale for a whole matrix, and the amax of nvfp4, need the whole matrix first, so
// these formats run the steps one by one.
bool fuses_quantize(const Format& format, std::string_view key) {
  return format.has_blocks() && !format.is_nv() && !marks_nonfinite(key);
}

// Both halves of the gradient must begin at a tile, so they must not be interleaved. The gradient of a bias is summed before quantization, so it needs the steps.
bool fuses_gradient_quantize(const Tensor& linear, const OperandFormats& formats,
                             const HiddenNeedsGrad& wanted, int64_t interleave) {
  constexpr int64_t kTwoTiles = 256;
  const c10::SymInt columns = linear.sym_size(1);
  return interleave == 0 && fuses_quantize(formats.grad, formats.grad_key) &&
         (wanted.input || wanted.weight) && !wanted.bias && columns > 0 && columns % kTwoTiles == 0;
}

// Whether grouped_gemm_swiglu takes these operands: no scales, and the dtype of the layer.
bool is_unquantized(const Quantized& values, const Quantized& weight, at::ScalarType dtype) {
  return !values.scale.defined() && values.data.scalar_type() == dtype && weight.data.scalar_type() == dtype;
}

}  // namespace

QuantizedOperand quantize_role(const Tensor& x, const Tensor& group_sizes, const Format& format,
                               std::string_view key, bool rows, bool columns) {
  if (format.family == FormatFamily::kNone) {
    return {{x, Tensor(), Tensor()}, {x, Tensor(), Tensor()}};
  }
  return quantize_operand(x, group_sizes, format, key, rows, columns);
}

QuantizedWeight quantize_role_weight(const Tensor& weight, const OptionalList& quantized,
                                     const OperandFormats& formats, bool backward) {
  if (quantized) return as_quantized_weight(*quantized, formats, backward);
  if (!formats.native()) return quantize_weight_operand(weight, formats, backward);
  const Quantized unquantized{weight, Tensor(), Tensor()};
  return {unquantized, backward ? unquantized : Quantized{}};
}

Hidden product_then_activation(QuantizedOperand input, QuantizedWeight weight, const MlpArguments& mlp,
                               const OperandFormats& formats, bool columns, bool keep_linear) {
  Hidden hidden;
  if (is_unquantized(input.rowwise, weight.forward, mlp.input.scalar_type())) {
    Tensor activation;
    std::tie(activation, hidden.linear) =
        call_grouped_gemm_swiglu(input.rowwise.data, weight.forward.data, mlp.group_sizes, mlp.probs,
                                 mlp.fc1_bias, mlp.interleave, /*keep_input=*/keep_linear, mlp.options);
    hidden.activation =
        quantize_role(activation, mlp.group_sizes, formats.input, formats.input_key, true, columns);
    return hidden;
  }
  hidden.linear = gemm_of(input.rowwise, weight.forward, mlp.group_sizes, mlp.fc1_bias, std::nullopt, true,
                          mlp.input.scalar_type(), mlp.options);
  input = {};
  weight = {};
  const Tensor halves = deinterleave(hidden.linear, mlp.interleave);
  if (!fuses_quantize(formats.input, formats.input_key)) {
    hidden.activation = quantize_role(activation::call_swiglu(halves, mlp.probs), mlp.group_sizes,
                                      formats.input, formats.input_key, true, columns);
    return hidden;
  }
  hidden.activation = operand_of(
      quantize::call_swiglu_quantize(halves, formats.input_key, mlp.probs, mlp.group_sizes, {true, columns}),
      formats.input, formats.input_key);
  return hidden;
}

namespace {

QuantizedGradient round_hidden_gradient(const Tensor& grad, const Tensor& group_sizes,
                                        const OperandFormats& formats, const HiddenNeedsGrad& wanted) {
  QuantizedGradient result;
  if (formats.native()) {
    result.values = quantize_role(grad, group_sizes, formats.grad, formats.grad_key, true, true);
  } else if (wanted.input || wanted.weight) {
    result = quantize_gradient(grad, group_sizes, formats.grad, formats.grad_key, wanted.input, wanted.weight,
                               wanted.bias);
  }
  if (wanted.bias && !result.bias.defined()) {
    std::tie(result.bias, std::ignore) =
        call_grouped_bias_backward(grad, group_sizes, std::nullopt, std::nullopt);
  }
  return result;
}

}  // namespace

// Two steps in every format: SwiGLU's gradient in the epilogue of the product takes longer.
HiddenGradient data_gradient_then_activation_backward(Quantized grad, const Quantized& weight,
                                                      bool transpose_b, const Tensor& linear,
                                                      const Tensor& group_sizes, const Tensor& probs,
                                                      const OperandFormats& formats,
                                                      const HiddenNeedsGrad& wanted, int64_t interleave,
                                                      const LaunchOptions& options) {
  Tensor grad_activation = gemm_of(grad, weight, group_sizes, std::nullopt, std::nullopt, transpose_b,
                                   linear.scalar_type(), options);
  grad = {};
  HiddenGradient result;
  if (fuses_gradient_quantize(linear, formats, wanted, interleave)) {
    quantize::SwigluBackwardQuantized quantized = quantize::call_swiglu_backward_quantize(
        grad_activation, linear, formats.grad_key, probs, group_sizes);
    result.linear.values = operand_of(std::move(quantized.values), formats.grad, formats.grad_key);
    result.probs = std::move(quantized.probs);
    return result;
  }
  Tensor grad_linear;
  std::tie(grad_linear, result.probs) =
      activation::call_swiglu_backward(grad_activation, deinterleave(linear, interleave), probs);
  grad_activation.reset();
  grad_linear = interleave_columns(grad_linear, interleave);
  result.linear = round_hidden_gradient(grad_linear, group_sizes, formats, wanted);
  return result;
}

}  // namespace transformer_plugin::linear
