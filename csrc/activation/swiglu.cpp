// swiglu and swiglu_backward: checks, kernel arguments and gradients (activation/swiglu.h).
#include "activation/swiglu.h"

#include "activation/swiglu_checks.h"
#include "common/autograd.h"
#include "common/check.h"
#include "common/register.h"
#include "common/tensor.h"

namespace transformer_plugin::activation {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Checks and the output, the same for every backend.
Tensor swiglu_output(const Tensor& input, const OptionalTensor& probs) {
  check_swiglu("swiglu", input, probs);
  return empty(input, {input.sym_size(0), input.sym_size(1) / 2}, input.scalar_type());
}

std::tuple<Tensor, Tensor> swiglu_backward_outputs(const Tensor& grad, const Tensor& input,
                                                   const OptionalTensor& probs) {
  constexpr const char* op = "swiglu_backward";
  check_swiglu(op, input, probs);
  check_swiglu_grad(op, grad, input);
  const c10::SymInt rows = probs ? input.sym_size(0) : c10::SymInt(0);
  return {empty(input, input.sym_sizes(), input.scalar_type()), empty(input, {rows}, at::kFloat)};
}

Tensor swiglu(const Tensor& input, const OptionalTensor& probs) {
  const Tensor output = swiglu_output(input, probs);
  const Tensor x = input.contiguous();
  const Tensor p = probs ? probs->contiguous() : Tensor();
  const SwigluArgs args{x.const_data_ptr(),
                        probs ? p.const_data_ptr<float>() : nullptr,
                        output.mutable_data_ptr(),
                        x.size(0),
                        x.size(1) / 2,
                        to_dtype(x.scalar_type())};
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (x.is_cuda()) {
    const CudaScope scope(x);
    launch_swiglu(args, scope.stream());
    return output;
  }
#endif
  swiglu_cpu(args);
  return output;
}

std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& grad, const Tensor& input,
                                           const OptionalTensor& probs) {
  auto outputs = swiglu_backward_outputs(grad, input, probs);
  const auto& [grad_input, grad_probs] = outputs;
  const Tensor g = grad.contiguous();
  const Tensor x = input.contiguous();
  const Tensor p = probs ? probs->contiguous() : Tensor();
  const int64_t tiles = (x.size(1) / 2 + kSumTile - 1) / kSumTile;
  Tensor partial;
  if (probs && !x.is_cpu()) partial = tiles == 1 ? grad_probs : empty(x, {tiles, x.size(0)}, at::kFloat);
  const SwigluBackwardArgs args{g.const_data_ptr(),
                                x.const_data_ptr(),
                                probs ? p.const_data_ptr<float>() : nullptr,
                                grad_input.mutable_data_ptr(),
                                probs ? grad_probs.mutable_data_ptr<float>() : nullptr,
                                partial.defined() ? partial.mutable_data_ptr<float>() : nullptr,
                                x.size(0),
                                x.size(1) / 2,
                                to_dtype(x.scalar_type())};
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (x.is_cuda()) {
    const CudaScope scope(x);
    launch_swiglu_backward(args, scope.stream());
    return outputs;
  }
#endif
  swiglu_backward_cpu(args);
  return outputs;
}

Tensor call_swiglu(const Tensor& input, const OptionalTensor& probs) {
  static const auto op = find_op<Tensor(const Tensor&, const OptionalTensor&)>("swiglu");
  return op.call(input, probs);
}

std::tuple<Tensor, Tensor> call_swiglu_backward(const Tensor& grad, const Tensor& input,
                                                const OptionalTensor& probs) {
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&);
  static const auto op = find_op<Signature>("swiglu_backward");
  return op.call(grad, input, probs);
}

class SwigluFunction : public DifferentiableOnce<SwigluFunction> {
 public:
  static constexpr const char* kName = "swiglu";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, const OptionalTensor& probs) {
    ctx->save_for_backward({input, or_undefined(probs)});
    const BelowAutograd guard;
    return call_swiglu(input, probs);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const OptionalTensor probs = as_optional(saved[1]);
    const auto [grad_input, grad_probs] = call_swiglu_backward(grads[0], saved[0], probs);
    return {grad_input, probs ? grad_probs : Tensor()};
  }
};

Tensor swiglu_autograd(const Tensor& input, const OptionalTensor& probs) {
  if (any_wants_grad(input, probs)) return SwigluFunction::apply(input, probs);
  const BelowAutograd guard;
  return call_swiglu(input, probs);
}

}  // namespace

void check_swiglu(const char* op, const Tensor& input, const OptionalTensor& probs) {
  const Argument input_argument{op, "input", input};
  check_dtype(input_argument, kFloatTypes);
  check_dim(input_argument, 2);
  TP_CHECK_VALUE(input.sym_size(1) % 2 == 0, op, "input",
                 "an even number of columns (gate and linear halves)", describe(input),
                 "Concatenate the two halves along the last dimension");
  if (!probs) return;
  const Argument probs_argument{op, "probs", *probs};
  check_dtype(probs_argument, {at::kFloat});
  check_dim(probs_argument, 1);
  check_size(probs_argument, 0, input.sym_size(0), "the rows of 'input'");
  check_same_device(probs_argument, input_argument);
}

void check_swiglu_grad(const char* op, const Tensor& grad, const Tensor& input) {
  const Argument argument{op, "grad", grad};
  check_dim(argument, 2);
  check_same_dtype(argument, {op, "input", input});
  check_same_device(argument, {op, "input", input});
  check_size(argument, 0, input.sym_size(0), "the rows of 'input'");
  check_size(argument, 1, input.sym_size(1) / 2, "half the columns of 'input'");
}

TP_IMPL("swiglu", swiglu, swiglu_output, swiglu_autograd);
// swiglu_backward has no Autograd registration.
TP_IMPL_CPU_CUDA("swiglu_backward", swiglu_backward);
TP_IMPL_FOR(Meta, "swiglu_backward", swiglu_backward_outputs);

}  // namespace transformer_plugin::activation
