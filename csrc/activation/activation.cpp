// activation and activation_backward: kernel arguments and gradients (activation/activation.h).
#include "activation/activation.h"

#include "activation/activation_checks.h"
#include "activation/node.h"
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
Tensor activation_output(const Tensor& input, const OptionalTensor& probs, const OptionalTensor& group_sizes,
                         std::string_view key) {
  constexpr const char* op = "activation";
  const Activation activation = parse_activation(op, key);
  check_activation(op, input, probs, activation);
  if (group_sizes) check_group_sizes({op, "group_sizes", *group_sizes}, {op, "input", input});
  return empty(input, {input.sym_size(0), input.sym_size(1) / activation.columns_per_feature()},
               input.scalar_type());
}

std::tuple<Tensor, Tensor> activation_backward_outputs(const Tensor& grad, const Tensor& input,
                                                       const OptionalTensor& probs,
                                                       const OptionalTensor& group_sizes,
                                                       std::string_view key) {
  constexpr const char* op = "activation_backward";
  const Activation activation = parse_activation(op, key);
  check_activation(op, input, probs, activation);
  check_activation_grad(op, grad, input, activation);
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

Tensor activation(const Tensor& input, const OptionalTensor& probs, const OptionalTensor& group_sizes,
                  std::string_view key) {
  const Tensor output = activation_output(input, probs, group_sizes, key);
  const Tensor offsets = offsets_of("activation", input, group_sizes);
  const Tensor x = input.contiguous();
  const Tensor p = probs ? probs->contiguous() : Tensor();
  const ActivationArgs args{x.const_data_ptr(),
                            probs ? p.const_data_ptr<float>() : nullptr,
                            output.mutable_data_ptr(),
                            x.size(0),
                            output.size(1),
                            to_dtype(x.scalar_type()),
                            end_of(offsets),
                            parse_activation("activation", key)};
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (x.is_cuda()) {
    const CudaScope scope(x);
    launch_activation(args, scope.stream());
    return output;
  }
#endif
  activation_cpu(args);
  return output;
}

std::tuple<Tensor, Tensor> activation_backward(const Tensor& grad, const Tensor& input,
                                               const OptionalTensor& probs, const OptionalTensor& group_sizes,
                                               std::string_view key) {
  auto outputs = activation_backward_outputs(grad, input, probs, group_sizes, key);
  const Tensor offsets = offsets_of("activation_backward", input, group_sizes);
  const auto& [grad_input, grad_probs] = outputs;
  const Tensor g = grad.contiguous();
  const Tensor x = input.contiguous();
  const Tensor p = probs ? probs->contiguous() : Tensor();
  const int64_t tiles = ceil_div(g.size(1), kSumTile);
  Tensor partial;
  if (probs && !x.is_cpu()) {
    const bool is_result = tiles == 1 && !group_sizes;
    partial = is_result ? grad_probs : empty(x, {tiles, x.size(0)}, at::kFloat);
  }
  const ActivationBackwardArgs args{g.const_data_ptr(),
                                    x.const_data_ptr(),
                                    probs ? p.const_data_ptr<float>() : nullptr,
                                    grad_input.mutable_data_ptr(),
                                    probs ? grad_probs.mutable_data_ptr<float>() : nullptr,
                                    partial.defined() ? partial.mutable_data_ptr<float>() : nullptr,
                                    x.size(0),
                                    g.size(1),
                                    to_dtype(x.scalar_type()),
                                    end_of(offsets),
                                    parse_activation("activation_backward", key)};
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (x.is_cuda()) {
    const CudaScope scope(x);
    launch_activation_backward(args, scope.stream());
    return outputs;
  }
#endif
  activation_backward_cpu(args);
  return outputs;
}

class ActivationNode : public DifferentiableOnce<ActivationNode> {
 public:
  static constexpr const char* kName = "activation";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, const OptionalTensor& probs,
                        const OptionalTensor& group_sizes, std::string_view key) {
    ctx->save_for_backward({input, or_undefined(probs), or_undefined(group_sizes)});
    save_key(ctx, key);
    const BelowAutograd guard;
    return ops::activation(input, probs, group_sizes, key);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const OptionalTensor probs = as_optional(saved[1]), group_sizes = as_optional(saved[2]);
    const auto [grad_input, grad_probs] =
        ops::activation_backward(grads[0], saved[0], probs, group_sizes, saved_key(ctx));
    return {group_sizes ? zero_past_groups(grad_input, *group_sizes) : grad_input,
            probs ? grad_probs : Tensor(), Tensor(), Tensor()};
  }
};

Tensor activation_autograd(const Tensor& input, const OptionalTensor& probs,
                           const OptionalTensor& group_sizes, std::string_view key) {
  if (any_requires_grad(input, probs)) return ActivationNode::apply(input, probs, group_sizes, key);
  const BelowAutograd guard;
  return ops::activation(input, probs, group_sizes, key);
}

}  // namespace

TP_IMPL(activation, activation, activation_output, activation_autograd);
// activation_backward has no Autograd registration.
TP_IMPL_CPU_CUDA(activation_backward, activation_backward);
TP_IMPL_FOR(Meta, activation_backward, activation_backward_outputs);

}  // namespace transformer_plugin::activation
