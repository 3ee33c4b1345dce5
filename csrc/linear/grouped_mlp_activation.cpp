#include "linear/grouped_mlp_activation.h"

#include <algorithm>

#include "common/ops/activation.h"
#include "common/ops/gemm.h"
#include "gemm/dispatch/run_gemm.h"
#include "gemm/ops/calls.h"
#include "linear/nonfinite.h"
#include "linear/products.h"
#include "linear/quantized_weight.h"
#include "quantize/ops/calls.h"

namespace transformer_plugin::linear {

using namespace gemm;  // layers are made of its ops and checks
namespace {

using at::Tensor;

// Block scales are computed within a tile. A scale for a whole matrix, and the amax of nvfp4, need the whole matrix first, so
// these formats run the steps one by one.
bool fuses_quantize(const activation::Activation& activation, const Format& format, std::string_view key) {
  return activation.is_quantized_in_one_pass() && format.has_blocks() && !format.is_nv() &&
         !marks_nonfinite(key);
}

// Both halves of the gradient must begin at a tile. The gradient of a bias is summed before quantization, so it needs the steps.
bool fuses_gradient_quantize(const SavedHidden& saved, const OperandFormats& formats,
                             const HiddenNeedsGrad& needs_grad) {
  constexpr int64_t kTwoTiles = 256;
  const c10::SymInt columns = saved.fc1_out.sym_size(1);
  return fuses_quantize(saved.activation, formats.grad, formats.grad_key) &&
         (needs_grad.input || needs_grad.weight) && !needs_grad.bias && columns > 0 &&
         columns % kTwoTiles == 0;
}

// The sizes for ops that compute all rows without them.
std::optional<Tensor> used_sizes(const Tensor& group_sizes, bool zero_tail) {
  return zero_tail ? std::nullopt : std::optional<Tensor>(group_sizes);
}

// Several matrices that lie in memory as one stack, as that. A tracer's tensors have no addresses.
void stack_if_contiguous(QuantizedWeight& weight) {
  const auto& matrices = weight.matrices;
  if (matrices.empty() || !std::all_of(matrices.begin(), matrices.end(), has_memory)) return;
  const std::optional<Tensor> stack = as_contiguous_stack(matrices);
  if (!stack) return;
  weight.forward.data = *stack;
  weight.matrices.clear();
}

}  // namespace

bool fuses_fc1_activation(const Quantized& input, QuantizedWeight& weight, const MlpArguments& mlp) {
  stack_if_contiguous(weight);
  const at::ScalarType dtype = mlp.input.scalar_type();
  return !input.scale.defined() && input.data.scalar_type() == dtype && weight.matrices.empty() &&
         weight.forward.data.scalar_type() == dtype;
}

Hidden fused_fc1_activation(const Quantized& input, const QuantizedWeight& weight, const MlpArguments& mlp,
                            const OperandFormats& formats, bool columns, bool keep_fc1_out) {
  Hidden hidden;
  Tensor activation;
  std::tie(activation, hidden.fc1_out) = ops::grouped_gemm_activation(
      input.data, weight.forward.data, mlp.group_sizes, mlp.probs, mlp.fc1_bias, mlp.activation.key,
      /*keep_input=*/keep_fc1_out, mlp.options.max_sms, mlp.options.expected_rows,
      as_optional(input.row_index), mlp.zero_tail());
  hidden.activation = quantize_operand(activation, mlp.group_sizes, formats.input, formats.input_key, true,
                                       columns, mlp.zero_tail());
  return hidden;
}

Hidden activation_of(const Tensor& fc1_out, const MlpArguments& mlp, const OperandFormats& formats,
                     bool columns) {
  const bool zero_tail = mlp.zero_tail();
  if (fuses_quantize(mlp.activation, formats.input, formats.input_key)) {
    return {fc1_out, operand_of(quantize::call_activation_quantize(fc1_out, formats.input_key, mlp.probs,
                                                                   mlp.group_sizes, {true, columns},
                                                                   mlp.activation.key, zero_tail),
                                formats.input, formats.input_key)};
  }
  const Tensor activation =
      ops::activation(fc1_out, mlp.probs, used_sizes(mlp.group_sizes, zero_tail), mlp.activation.key);
  return {fc1_out, quantize_operand(activation, mlp.group_sizes, formats.input, formats.input_key, true,
                                    columns, zero_tail)};
}

namespace {

QuantizedGradient quantize_fc1_out_gradient(const Tensor& grad, const SavedHidden& saved,
                                            const OperandFormats& formats,
                                            const HiddenNeedsGrad& needs_grad) {
  const auto& [fc1_out, group_sizes, probs, activation, options, zero_tail] = saved;
  QuantizedGradient result;
  if (formats.unquantized()) {
    result.values =
        quantize_operand(grad, group_sizes, formats.grad, formats.grad_key, true, true, zero_tail);
  } else if (needs_grad.input || needs_grad.weight) {
    result = quantize_gradient(grad, group_sizes, formats.grad, formats.grad_key, needs_grad.input,
                               needs_grad.weight, needs_grad.bias, zero_tail);
  }
  if (needs_grad.bias && !result.bias.defined()) {
    std::tie(result.bias, std::ignore) =
        ops::grouped_bias_backward(grad, group_sizes, std::nullopt, std::nullopt);
  }
  return result;
}

}  // namespace

// Two steps in every format: the gradient of SwiGLU in the epilogue of the product takes longer.
HiddenGradient fc2_dgrad_activation_backward(Quantized grad, const WeightForBackward& fc2,
                                             const SavedHidden& saved, const OperandFormats& formats,
                                             const HiddenNeedsGrad& needs_grad) {
  const auto& [fc1_out, group_sizes, probs, activation, options, zero_tail] = saved;
  Tensor grad_activation = gemm_of({.a = grad,
                                    .b = fc2.values,
                                    .matrices = fc2.matrices(),
                                    .group_sizes = group_sizes,
                                    .transpose_b = fc2.values.transposed,
                                    .dtype = fc1_out.scalar_type(),
                                    .options = options,
                                    .zero_tail = zero_tail});
  grad = {};
  HiddenGradient result;
  if (fuses_gradient_quantize(saved, formats, needs_grad)) {
    quantize::ActivationBackwardQuantized quantized = quantize::call_activation_backward_quantize(
        grad_activation, fc1_out, formats.grad_key, probs, group_sizes, activation.key, zero_tail);
    result.fc1_out.values = operand_of(std::move(quantized.values), formats.grad, formats.grad_key);
    result.probs = std::move(quantized.probs);
    return result;
  }
  Tensor grad_fc1_out;
  std::tie(grad_fc1_out, result.probs) = ops::activation_backward(
      grad_activation, fc1_out, probs, used_sizes(group_sizes, zero_tail), activation.key);
  grad_activation.reset();
  result.fc1_out = quantize_fc1_out_gradient(grad_fc1_out, saved, formats, needs_grad);
  return result;
}

}  // namespace transformer_plugin::linear
