// swiglu and swiglu_backward: checks, kernel arguments and gradients (activation/swiglu.h).
#include "activation/swiglu.h"

#include <ATen/ops/arange.h>

#include "activation/swiglu_checks.h"
#include "common/autograd.h"
#include "common/check.h"
#include "common/group_offsets.h"
#include "common/ops/activation.h"
#include "common/register.h"
#include "common/tensor.h"

namespace transformer_plugin::activation {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Checks and the output, the same for every backend.
Tensor swiglu_output(const Tensor& input, const OptionalTensor& probs, const OptionalTensor& group_sizes,
                     int64_t interleave) {
  constexpr const char* op = "swiglu";
  check_swiglu(op, input, probs);
  check_interleave({op, "input", input}, input.sym_size(1) / 2, interleave);
  if (group_sizes) check_group_sizes({op, "group_sizes", *group_sizes}, {op, "input", input});
  return empty(input, {input.sym_size(0), input.sym_size(1) / 2}, input.scalar_type());
}

std::tuple<Tensor, Tensor> swiglu_backward_outputs(const Tensor& grad, const Tensor& input,
                                                   const OptionalTensor& probs,
                                                   const OptionalTensor& group_sizes, int64_t interleave) {
  constexpr const char* op = "swiglu_backward";
  check_swiglu(op, input, probs);
  check_interleave({op, "input", input}, input.sym_size(1) / 2, interleave);
  check_swiglu_grad(op, grad, input);
  if (group_sizes) check_group_sizes({op, "group_sizes", *group_sizes}, {op, "input", input});
  const c10::SymInt rows = probs ? input.sym_size(0) : c10::SymInt(0);
  return {empty(input, input.sym_sizes(), input.scalar_type()), empty(input, {rows}, at::kFloat)};
}

// The first rows of the groups; undefined without groups.
Tensor offsets_of(const char* op, const Tensor& input, const OptionalTensor& group_sizes) {
  if (!group_sizes) return {};
  return group_offsets({op, "group_sizes", *group_sizes}, {op, "input", input}, input.size(0));
}

// The first row past the last group.
const int32_t* end_of(const Tensor& offsets) {
  return offsets.defined() ? offsets.const_data_ptr<int32_t>() + offsets.size(0) - 1 : nullptr;
}

Tensor swiglu(const Tensor& input, const OptionalTensor& probs, const OptionalTensor& group_sizes,
              int64_t interleave) {
  const Tensor output = swiglu_output(input, probs, group_sizes, interleave);
  const Tensor offsets = offsets_of("swiglu", input, group_sizes);
  const Tensor x = input.contiguous();
  const Tensor p = probs ? probs->contiguous() : Tensor();
  const SwigluArgs args{x.const_data_ptr(),
                        probs ? p.const_data_ptr<float>() : nullptr,
                        output.mutable_data_ptr(),
                        x.size(0),
                        x.size(1) / 2,
                        to_dtype(x.scalar_type()),
                        end_of(offsets),
                        interleave != 0};
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
                                           const OptionalTensor& probs, const OptionalTensor& group_sizes,
                                           int64_t interleave) {
  auto outputs = swiglu_backward_outputs(grad, input, probs, group_sizes, interleave);
  const Tensor offsets = offsets_of("swiglu_backward", input, group_sizes);
  const auto& [grad_input, grad_probs] = outputs;
  const Tensor g = grad.contiguous();
  const Tensor x = input.contiguous();
  const Tensor p = probs ? probs->contiguous() : Tensor();
  const int64_t tiles = (x.size(1) / 2 + kSumTile - 1) / kSumTile;
  Tensor partial;
  if (probs && !x.is_cpu()) {
    const bool is_result = tiles == 1 && !group_sizes;
    partial = is_result ? grad_probs : empty(x, {tiles, x.size(0)}, at::kFloat);
  }
  const SwigluBackwardArgs args{g.const_data_ptr(),
                                x.const_data_ptr(),
                                probs ? p.const_data_ptr<float>() : nullptr,
                                grad_input.mutable_data_ptr(),
                                probs ? grad_probs.mutable_data_ptr<float>() : nullptr,
                                partial.defined() ? partial.mutable_data_ptr<float>() : nullptr,
                                x.size(0),
                                x.size(1) / 2,
                                to_dtype(x.scalar_type()),
                                end_of(offsets),
                                interleave != 0};
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

// With zeros past the last group: callers of autograd may add up the gradients of all rows.
Tensor before_tail(const Tensor& rows, const Tensor& group_sizes) {
  const Tensor end = group_sizes.clamp_min(0).sum();
  const Tensor index = at::arange(c10::Scalar(rows.sym_size(0)), end.options());
  return rows.masked_fill(index.ge(end).unsqueeze(1), 0.0);
}

class SwigluFunction : public DifferentiableOnce<SwigluFunction> {
 public:
  static constexpr const char* kName = "swiglu";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, const OptionalTensor& probs,
                        const OptionalTensor& group_sizes, int64_t interleave) {
    ctx->save_for_backward({input, or_undefined(probs), or_undefined(group_sizes)});
    if (interleave != 0) ctx->saved_data["interleave"] = interleave;
    const BelowAutograd guard;
    return ops::swiglu(input, probs, group_sizes, interleave);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const OptionalTensor probs = as_optional(saved[1]), group_sizes = as_optional(saved[2]);
    const auto interleave = ctx->saved_data.find("interleave");
    const auto [grad_input, grad_probs] =
        ops::swiglu_backward(grads[0], saved[0], probs, group_sizes,
                             interleave == ctx->saved_data.end() ? 0 : interleave->second.toInt());
    return {group_sizes ? before_tail(grad_input, *group_sizes) : grad_input, probs ? grad_probs : Tensor(),
            Tensor(), Tensor()};
  }
};

Tensor swiglu_autograd(const Tensor& input, const OptionalTensor& probs, const OptionalTensor& group_sizes,
                       int64_t interleave) {
  if (any_wants_grad(input, probs)) return SwigluFunction::apply(input, probs, group_sizes, interleave);
  const BelowAutograd guard;
  return ops::swiglu(input, probs, group_sizes, interleave);
}

}  // namespace

void check_interleave(const Argument& argument, const c10::SymInt& features, int64_t interleave) {
  TP_CHECK_VALUE(interleave == 0 || interleave == kInterleave, argument.op, "interleave",
                 "0 (the gate's columns first) or 32 (32 of the gate, 32 of the linear part, in turn)",
                 interleave, "Reorder the rows of the weight");
  TP_CHECK_VALUE(interleave == 0 || features % kInterleave == 0, argument.op, argument.name,
                 "whole blocks of 32 columns of the gate and of the linear part",
                 describe(argument.tensor) << " for " << features << " of each",
                 "Take a multiple of 32, or interleave=0");
}

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

TP_IMPL(swiglu, swiglu, swiglu_output, swiglu_autograd);
// swiglu_backward has no Autograd registration.
TP_IMPL_CPU_CUDA(swiglu_backward, swiglu_backward);
TP_IMPL_FOR(Meta, swiglu_backward, swiglu_backward_outputs);

}  // namespace transformer_plugin::activation
