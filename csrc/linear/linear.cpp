// linear: input [..., K] times weight [N, K] transposed, plus bias [N], with its gradient, in any format.
#include <ATen/ops/mm.h>

#include "common/autograd.h"
#include "common/register.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/generic/dense_gemm.h"
#include "gemm/ops/calls.h"
#include "gemm/ops/leading_dims.h"
#include "linear/main_grad.h"
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
const OptionalTensor kNoTensor = std::nullopt;

// The arguments of a call.
struct Call {
  const Tensor &input, &weight;
  const OptionalTensor& bias;
  std::string_view input_format, weight_format, grad_format;
  OptionalList quantized_weight;
  MainGrad main_grad;

  OperandFormats formats() const { return operand_formats(kOp, input_format, weight_format, grad_format); }
  LinearArguments layer(const Tensor& rows) const {
    return {rows, weight, kNoTensor, bias, kNoTensor, quantized_weight, {}, main_grad};
  }
};

OperandFormats check_linear(const Call& call) {
  const OperandFormats formats = call.formats();
  const Argument input{kOp, "input", call.input}, weight{kOp, "weight", call.weight};
  const WeightArgument weights{kOp, "weight", call.weight};
  check_dtype(input, formats.native() ? kGemmTypes : kFloatTypes);
  TP_CHECK_VALUE(call.input.dim() > 0, kOp, "input", "at least 1 dimension", describe(call.input),
                 "Reshape it first");
  check_pair(weight, input, 2);
  check_size(weight, 1, call.input.sym_size(-1), "the last dimension of 'input'");
  check_layer_widths(input, weights, formats);
  if (call.bias) check_bias({kOp, "bias", *call.bias}, input, std::nullopt, call.weight.sym_size(0));
  check_quantized_weight("quantized_weight", call.quantized_weight, weights, formats);
  const MainGrad& main_grad = call.main_grad;
  check_weight_gradient(main_grad, weights, false, call.input);
  if (!main_grad.buffers) return formats;
  CallMemory memory(kOp);
  memory.written("main_grad", main_grad.buffers);
  memory.read("input", call.input);
  memory.read("weight", call.weight);
  memory.read("bias", call.bias);
  memory.read("quantized_weight", call.quantized_weight);
  memory.check();
  return formats;
}

Tensor linear_meta(const Call& call) {
  check_linear(call);
  return empty(call.input, with_columns(call.input, call.weight.sym_size(0)), call.input.scalar_type());
}

Tensor linear(const Call& call) {
  const OperandFormats formats = check_linear(call);
  const BelowAutograd guard;
  const Tensor x = as_matrix(call.input);
  if (formats.native()) {
    return from_matrix(dense_gemm(x, transposed_view(call.weight), call.bias, x.scalar_type()), call.input);
  }
  const LinearArguments layer = call.layer(x);
  check_quantizable(kOp, layer, formats, false);
  return from_matrix(quantized_linear_forward(layer, formats), call.input);
}

Tensor redispatch(const Call& call) {
  using Signature = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, std::string_view,
                           std::string_view, std::string_view, OptionalList, const OptionalTensor&, bool,
                           std::string_view, const OptionalTensor&);
  static const auto op = find_op<Signature>(kOp);
  const OptionalList& buffers = call.main_grad.buffers;
  return op.call(call.input, call.weight, call.bias, call.input_format, call.weight_format, call.grad_format,
                 call.quantized_weight, buffers ? OptionalTensor((*buffers)[0]) : std::nullopt,
                 call.main_grad.accumulate, call.main_grad.weight_grad, call.main_grad.queue);
}

Tensor plain_forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  const BelowAutograd guard;
  return redispatch({input, weight, bias, "none", "none", "none", std::nullopt, {}});
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
    return plain_forward(input, weight, bias);
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

// The same with a main_grad or a queue. The gradients of input and bias have the bits of those above.
template <bool has_bias>
class LinearMainGradFunction : public DifferentiableOnce<LinearMainGradFunction<has_bias>> {
 public:
  static constexpr const char* kName = "linear";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias, const MainGrad& main_grad) {
    const bool wants_weight = weight.requires_grad();
    ctx->save_for_backward({wants_weight ? input : Tensor(), input.requires_grad() ? weight : Tensor()});
    if (wants_weight) save_main_grad(ctx, "main_grad", main_grad);
    return plain_forward(input, weight, bias);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor grad = as_matrix(grads[0]);
    Tensor grad_input, grad_weight, grad_bias;
    if (ctx->needs_input_grad(0)) grad_input = from_matrix(at::mm(grad, saved[1]), grads[0]);
    const WeightGradient weight_gradient(ctx, "main_grad", 1, 1, false);
    if (weight_gradient.is_wanted()) {
      const Quantized g{grad, Tensor(), Tensor()}, x{as_matrix(saved[0]), Tensor(), Tensor()};
      grad_weight = weight_gradient.compute(g, x, std::nullopt, grad.scalar_type())[0];
    }
    if constexpr (has_bias) {
      if (ctx->needs_input_grad(2)) grad_bias = call_bias_backward(grad);
    }
    return {grad_input, grad_weight, grad_bias, Tensor()};
  }
};

Tensor linear_autograd(const Call& call) {
  const auto& [input, weight, bias, input_format, weight_format, grad_format, quantized, main_grad] = call;
  if (!any_wants_grad(input, weight, bias)) {
    const BelowAutograd guard;
    return redispatch(call);
  }
  const bool is_native = input_format == "none" && weight_format == "none" && grad_format == "none";
  const bool is_plain = is_native && !quantized && main_grad.accumulate && main_grad.weight_grad == "none";
  if (is_plain && !main_grad.buffers && !main_grad.queue) {
    return bias ? LinearFunction<true>::apply(input, weight, bias)
                : LinearFunction<false>::apply(input, weight, bias);
  }
  const OperandFormats formats = check_linear(call);
  if (formats.native()) {
    return bias ? LinearMainGradFunction<true>::apply(input, weight, bias, main_grad)
                : LinearMainGradFunction<false>::apply(input, weight, bias, main_grad);
  }
  const Tensor x = as_matrix(input);
  const LinearArguments layer = call.layer(x);
  check_quantizable(kOp, layer, formats, weight.requires_grad());
  return from_matrix(quantized_linear_autograd(layer, formats), input);
}

template <Tensor (*run)(const Call&)>
Tensor entry_of(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                std::string_view input_format, std::string_view weight_format, std::string_view grad_format,
                OptionalList quantized_weight, const OptionalTensor& main_grad, bool accumulate,
                std::string_view weight_grad, const OptionalTensor& wgrad_queue) {
  const OptionalList buffers = main_grad ? OptionalList(at::TensorList(*main_grad)) : std::nullopt;
  return run({input,
              weight,
              bias,
              input_format,
              weight_format,
              grad_format,
              quantized_weight,
              {buffers, accumulate, weight_grad, wgrad_queue}});
}

}  // namespace

TP_IMPL(kOp, entry_of<linear>, entry_of<linear_meta>, entry_of<linear_autograd>);

}  // namespace transformer_plugin::linear
