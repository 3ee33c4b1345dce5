// rms_norm, layer_norm, their forms that return statistics, and their gradients (norm/norm.h).
#include "norm/norm.h"

#include "common/autograd.h"
#include "common/check.h"
#include "common/ops/norm.h"
#include "common/register.h"
#include "common/tensor.h"
#include "norm/calls.h"
#include "norm/norm_call.h"

namespace transformer_plugin::norm {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Forward {
  Tensor output;
  Stats stats;
};

// Checks and outputs, the same for every backend.
Forward forward_outputs(const NormCall& call) {
  check_norm(call);
  return {empty(call.input, call.input.sym_sizes(), call.input.scalar_type()), make_stats(call)};
}

Tensor plain_output(const NormCall& call) {
  check_norm(call);
  return empty(call.input, call.input.sym_sizes(), call.input.scalar_type());
}

void launch(const NormCall& call, const Tensor& output, const Stats* stats) {
  const NormArgsOwner arguments(call, stats);
  if (output.is_cpu()) return norm_cpu(arguments.get(), output.mutable_data_ptr());
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(output);
  launch_norm(arguments.get(), output.mutable_data_ptr(), scope.stream());
#endif
}

Forward run_forward(const NormCall& call) {
  const Forward result = forward_outputs(call);
  launch(call, result.output, &result.stats);
  return result;
}

Tensor run_plain(const NormCall& call) {
  const Tensor output = plain_output(call);
  launch(call, output, nullptr);
  return output;
}

struct BackwardCall {
  const char* op;
  const Tensor& grad;
  const Tensor& input;
  const OptionalTensor& weight;
  const OptionalTensor& mean;  // given if centered
  const Tensor& rstd;
  bool zero_centered;
  bool has_bias;
};

struct Gradients {
  Tensor input, weight, bias;  // weight and bias have no elements if there is no such parameter
};

void check_stats(const BackwardCall& call, const char* name, const Tensor& stats) {
  const Argument argument{call.op, name, stats};
  check_dtype(argument, {at::kFloat});
  check_same_device(argument, {call.op, "input", call.input});
  const auto sizes = call.input.sym_sizes();
  TP_CHECK_VALUE(stats.sym_sizes() == sizes.slice(0, sizes.size() - 1), call.op, name,
                 "a number for each row of 'input', " << describe(call.input), describe(stats),
                 "Pass what the forward op returned");
}

Gradients backward_outputs(const BackwardCall& call) {
  check_norm({call.op, call.mean.has_value(), call.input, call.weight, kNoTensor, 0.0, call.zero_centered});
  const Argument grad{call.op, "grad", call.grad}, input{call.op, "input", call.input};
  check_same_dtype(grad, input);
  check_same_device(grad, input);
  TP_CHECK_VALUE(call.grad.sym_sizes() == call.input.sym_sizes(), call.op, "grad",
                 "the sizes of 'input', " << describe(call.input), describe(call.grad),
                 "Pass the gradient of the output");
  if (call.mean) check_stats(call, "mean", *call.mean);
  check_stats(call, "rstd", call.rstd);
  const c10::SymInt cols = call.input.sym_size(-1), none = 0;
  const at::ScalarType dtype = call.input.scalar_type();
  return {empty(call.input, call.input.sym_sizes(), dtype),
          empty(call.input, {call.weight ? cols : none}, dtype),
          empty(call.input, {call.has_bias ? cols : none}, dtype)};
}

// Column sums over the rows and their scratch memory; undefined if not requested.
struct Sums {
  Tensor partial, sums;

  Sums(const Tensor& input, bool wanted) {
    if (!wanted) return;
    const int64_t cols = input.size(-1), rows = input.numel() / cols;
    partial = empty(input, {ColumnSums::slots(rows, 1), cols}, at::kFloat);
    sums = empty(input, {cols}, at::kFloat);
  }
  ColumnSums args(const Tensor& input) const {
    const int64_t cols = input.size(-1), rows = input.numel() / cols;
    if (!sums.defined()) return {nullptr, nullptr, nullptr, 1, rows, cols};
    return {partial.mutable_data_ptr<float>(), sums.mutable_data_ptr<float>(), nullptr, 1, rows, cols};
  }
  // Rounds once to the dtype of the gradient.
  void round_into(Tensor& gradient) const {
    if (sums.defined()) gradient = sums.to(gradient.scalar_type());
  }
};

Gradients run_backward(const BackwardCall& call) {
  Gradients gradients = backward_outputs(call);
  const BelowAutograd guard;
  const Tensor g = call.grad.contiguous(), x = call.input.contiguous(), rstd = call.rstd.contiguous();
  const Tensor w = call.weight ? call.weight->contiguous() : Tensor();
  const Tensor mean = call.mean ? call.mean->contiguous() : Tensor();
  const Sums of_weight(x, call.weight.has_value()), of_bias(x, call.has_bias);
  const NormBackwardArgs args{g.const_data_ptr(),
                              x.const_data_ptr(),
                              w.defined() ? w.const_data_ptr() : nullptr,
                              mean.defined() ? mean.const_data_ptr<float>() : nullptr,
                              rstd.const_data_ptr<float>(),
                              gradients.input.mutable_data_ptr(),
                              of_weight.args(x),
                              of_bias.args(x),
                              x.numel() / x.size(-1),
                              x.size(-1),
                              call.zero_centered,
                              to_dtype(x.scalar_type())};
  if (x.is_cpu()) {
    norm_backward_cpu(args);
  } else {
#ifdef TRANSFORMER_PLUGIN_CUDA
    const CudaScope scope(x);
    launch_norm_backward(args, scope.stream());
#endif
  }
  of_weight.round_into(gradients.weight);
  of_bias.round_into(gradients.bias);
  return gradients;
}

// The registered functions. `plain`, `forward` and `backward` are those of the devices or of Meta.

template <Tensor (*plain)(const NormCall&)>
Tensor rms_norm(const Tensor& input, const OptionalTensor& weight, double eps, bool zero_centered) {
  return plain({"rms_norm", false, input, weight, kNoTensor, eps, zero_centered});
}

template <Forward (*forward)(const NormCall&)>
Two rms_norm_forward(const Tensor& input, const OptionalTensor& weight, double eps, bool zero_centered) {
  const Forward f = forward({"rms_norm_forward", false, input, weight, kNoTensor, eps, zero_centered});
  return {f.output, f.stats.rstd};
}

template <Gradients (*backward)(const BackwardCall&)>
Two rms_norm_backward(const Tensor& grad, const Tensor& input, const OptionalTensor& weight,
                      const Tensor& rstd, bool zero_centered) {
  const Gradients g =
      backward({"rms_norm_backward", grad, input, weight, kNoTensor, rstd, zero_centered, false});
  return {g.input, g.weight};
}

template <Tensor (*plain)(const NormCall&)>
Tensor layer_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                  bool zero_centered) {
  return plain({"layer_norm", true, input, weight, bias, eps, zero_centered});
}

template <Forward (*forward)(const NormCall&)>
Three layer_norm_forward(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                         double eps, bool zero_centered) {
  const Forward f = forward({"layer_norm_forward", true, input, weight, bias, eps, zero_centered});
  return {f.output, f.stats.mean, f.stats.rstd};
}

template <Gradients (*backward)(const BackwardCall&)>
Three layer_norm_backward(const Tensor& grad, const Tensor& input, const OptionalTensor& weight,
                          const Tensor& mean, const Tensor& rstd, bool zero_centered, bool has_bias) {
  const OptionalTensor means = mean;
  const Gradients g =
      backward({"layer_norm_backward", grad, input, weight, means, rstd, zero_centered, has_bias});
  return {g.input, g.weight, g.bias};
}

// Flags are template parameters of the node, so that it saves only tensors. Only the ops that return
// statistics have them as outputs of the node, because each output costs time.
template <bool zero_centered>
class RmsNormFunction : public DifferentiableOnce<RmsNormFunction<zero_centered>> {
 public:
  static constexpr const char* kName = "rms_norm";
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& input, const OptionalTensor& weight,
                               double eps, bool with_stats) {
    const BelowAutograd guard;
    const auto [output, rstd] = ops::rms_norm_forward(input, weight, eps, zero_centered);
    ctx->save_for_backward({input, or_undefined(weight), rstd});
    ctx->set_materialize_grads(false);
    if (!with_stats) return {output};
    ctx->mark_non_differentiable({rstd});
    return {output, rstd};
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(4);
    if (!grads[0].defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const auto [input, weight] =
        ops::rms_norm_backward(grads[0], saved[0], as_optional(saved[1]), saved[2], zero_centered);
    result[0] = input;
    if (saved[1].defined()) result[1] = weight;
    return result;
  }
};

variable_list record_rms_norm(const Tensor& input, const OptionalTensor& weight, double eps,
                              bool zero_centered, bool with_stats) {
  return zero_centered ? RmsNormFunction<true>::apply(input, weight, eps, with_stats)
                       : RmsNormFunction<false>::apply(input, weight, eps, with_stats);
}

template <bool zero_centered, bool has_bias>
class LayerNormFunction : public DifferentiableOnce<LayerNormFunction<zero_centered, has_bias>> {
 public:
  static constexpr const char* kName = "layer_norm";
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& input, const OptionalTensor& weight,
                               const OptionalTensor& bias, double eps, bool with_stats) {
    const BelowAutograd guard;
    const auto [output, mean, rstd] = ops::layer_norm_forward(input, weight, bias, eps, zero_centered);
    ctx->save_for_backward({input, or_undefined(weight), mean, rstd});
    ctx->set_materialize_grads(false);
    if (!with_stats) return {output};
    ctx->mark_non_differentiable({mean, rstd});
    return {output, mean, rstd};
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(5);
    if (!grads[0].defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const auto [input, weight, bias] = ops::layer_norm_backward(grads[0], saved[0], as_optional(saved[1]),
                                                                saved[2], saved[3], zero_centered, has_bias);
    result[0] = input;
    if (saved[1].defined()) result[1] = weight;
    if (has_bias) result[2] = bias;
    return result;
  }
};

template <bool zero_centered>
variable_list record_layer_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                                double eps, bool with_stats) {
  return bias ? LayerNormFunction<zero_centered, true>::apply(input, weight, bias, eps, with_stats)
              : LayerNormFunction<zero_centered, false>::apply(input, weight, bias, eps, with_stats);
}

variable_list record_layer_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                                double eps, bool zero_centered, bool with_stats) {
  return zero_centered ? record_layer_norm<true>(input, weight, bias, eps, with_stats)
                       : record_layer_norm<false>(input, weight, bias, eps, with_stats);
}

Two rms_norm_forward_autograd(const Tensor& input, const OptionalTensor& weight, double eps,
                              bool zero_centered) {
  if (any_requires_grad(input, weight)) {
    const variable_list out = record_rms_norm(input, weight, eps, zero_centered, true);
    return {out[0], out[1]};
  }
  const BelowAutograd guard;
  return ops::rms_norm_forward(input, weight, eps, zero_centered);
}

Tensor rms_norm_autograd(const Tensor& input, const OptionalTensor& weight, double eps, bool zero_centered) {
  if (any_requires_grad(input, weight)) return record_rms_norm(input, weight, eps, zero_centered, false)[0];
  const BelowAutograd guard;
  return ops::rms_norm(input, weight, eps, zero_centered);
}

Three layer_norm_forward_autograd(const Tensor& input, const OptionalTensor& weight,
                                  const OptionalTensor& bias, double eps, bool zero_centered) {
  if (any_requires_grad(input, weight, bias)) {
    const variable_list out = record_layer_norm(input, weight, bias, eps, zero_centered, true);
    return {out[0], out[1], out[2]};
  }
  const BelowAutograd guard;
  return ops::layer_norm_forward(input, weight, bias, eps, zero_centered);
}

Tensor layer_norm_autograd(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                           double eps, bool zero_centered) {
  if (any_requires_grad(input, weight, bias)) {
    return record_layer_norm(input, weight, bias, eps, zero_centered, false)[0];
  }
  const BelowAutograd guard;
  return ops::layer_norm(input, weight, bias, eps, zero_centered);
}

}  // namespace

TP_IMPL(rms_norm, rms_norm<run_plain>, rms_norm<plain_output>, rms_norm_autograd);
TP_IMPL(rms_norm_forward, rms_norm_forward<run_forward>, rms_norm_forward<forward_outputs>,
        rms_norm_forward_autograd);
TP_IMPL(layer_norm, layer_norm<run_plain>, layer_norm<plain_output>, layer_norm_autograd);
TP_IMPL(layer_norm_forward, layer_norm_forward<run_forward>, layer_norm_forward<forward_outputs>,
        layer_norm_forward_autograd);

// The backward ops have no Autograd registration.
TP_IMPL_CPU_CUDA(rms_norm_backward, rms_norm_backward<run_backward>);
TP_IMPL_FOR(Meta, rms_norm_backward, rms_norm_backward<backward_outputs>);
TP_IMPL_CPU_CUDA(layer_norm_backward, layer_norm_backward<run_backward>);
TP_IMPL_FOR(Meta, layer_norm_backward, layer_norm_backward<backward_outputs>);

}  // namespace transformer_plugin::norm
