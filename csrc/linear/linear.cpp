// linear: input [..., K] times weight [N, K] transposed, plus bias [N], with its gradient, in any format.
#include <ATen/ops/mm.h>

#include "common/autograd.h"
#include "common/register.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/generic/dense_gemm.h"
#include "gemm/ops/calls.h"
#include "gemm/ops/leading_dims.h"
#include "linear/quantized_linear.h"
#include "linear/quantized_weight.h"

namespace transformer_plugin::linear {

using namespace gemm;  // layers are made of its ops and checks
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "linear";

void check_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                  const OperandFormats& formats, const OptionalList& quantized_weight) {
  const Argument input_argument{kOp, "input", input};
  const Argument weight_argument{kOp, "weight", weight};
  check_dtype(input_argument, formats.native() ? kGemmTypes : kFloatTypes);
  TP_CHECK_VALUE(input.dim() > 0, kOp, "input", "at least 1 dimension", describe(input), "Reshape it first");
  check_pair(weight_argument, input_argument, 2);
  check_size(weight_argument, 1, input.sym_size(-1), "the last dimension of 'input'");
  check_layer_widths(input_argument, weight_argument, formats);
  if (bias) check_bias({kOp, "bias", *bias}, input_argument, std::nullopt, weight.sym_size(0));
  check_quantized_weight("quantized_weight", quantized_weight, weight_argument, formats);
}

Tensor linear_meta(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   std::string_view input_format, std::string_view weight_format,
                   std::string_view grad_format, OptionalList quantized_weight) {
  check_linear(input, weight, bias, operand_formats(kOp, input_format, weight_format, grad_format),
               quantized_weight);
  return empty(input, with_columns(input, weight.sym_size(0)), input.scalar_type());
}

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
              std::string_view input_format, std::string_view weight_format, std::string_view grad_format,
              OptionalList quantized_weight) {
  const OperandFormats formats = operand_formats(kOp, input_format, weight_format, grad_format);
  check_linear(input, weight, bias, formats, quantized_weight);
  const BelowAutograd guard;
  const Tensor x = as_matrix(input);
  if (formats.native())
    return from_matrix(dense_gemm(x, transposed_view(weight), bias, input.scalar_type()), input);
  const LinearArguments layer{x, weight, std::nullopt, bias, std::nullopt, quantized_weight};
  check_quantizable(kOp, layer, formats, false);
  return from_matrix(quantized_linear_forward(layer, formats), input);
}

Tensor call_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   std::string_view input_format, std::string_view weight_format,
                   std::string_view grad_format, OptionalList quantized_weight) {
  using Signature = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, std::string_view,
                           std::string_view, std::string_view, OptionalList);
  static const auto op = find_op<Signature>(kOp);
  return op.call(input, weight, bias, input_format, weight_format, grad_format, quantized_weight);
}

// Without quantization. Two nodes, with and without a bias, so that only tensors are saved.
template <bool has_bias>
class LinearFunction : public DifferentiableTwice<LinearFunction<has_bias>> {
 public:
  static constexpr const char* kName = "linear";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias) {
    ctx->save_for_backward(
        {weight.requires_grad() ? input : Tensor(), input.requires_grad() ? weight : Tensor()});
    const BelowAutograd guard;
    return call_linear(input, weight, bias, "none", "none", "none", std::nullopt);
  }

  // The bias's gradient is float32; the autograd engine casts it to the bias's dtype.
  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor grad = as_matrix(grads[0]);
    Tensor grad_input, grad_weight, grad_bias;
    if (ctx->needs_input_grad(0)) grad_input = from_matrix(at::mm(grad, saved[1]), grads[0]);
    if (ctx->needs_input_grad(1)) grad_weight = at::mm(grad.t(), as_matrix(saved[0]));
    if constexpr (has_bias) {
      if (ctx->needs_input_grad(2)) grad_bias = call_bias_backward(grad);
    }
    return {grad_input, grad_weight, grad_bias};
  }
};

Tensor linear_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       std::string_view input_format, std::string_view weight_format,
                       std::string_view grad_format, OptionalList quantized_weight) {
  if (!any_wants_grad(input, weight, bias)) {
    const BelowAutograd guard;
    return call_linear(input, weight, bias, input_format, weight_format, grad_format, quantized_weight);
  }
  const OperandFormats formats = operand_formats(kOp, input_format, weight_format, grad_format);
  if (formats.native() && !quantized_weight) {
    return bias ? LinearFunction<true>::apply(input, weight, bias)
                : LinearFunction<false>::apply(input, weight, bias);
  }
  check_linear(input, weight, bias, formats, quantized_weight);
  const Tensor x = as_matrix(input);
  const LinearArguments layer{x, weight, std::nullopt, bias, std::nullopt, quantized_weight};
  check_quantizable(kOp, layer, formats, weight.requires_grad());
  return from_matrix(quantized_linear_autograd(layer, formats), input);
}

}  // namespace

TP_IMPL(kOp, linear, linear_meta, linear_autograd);

}  // namespace transformer_plugin::linear
