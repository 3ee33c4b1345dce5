// router_logits, router_logits_with_tokens and router_logits_backward: checks, the products, and the gradients
// (routing/router_logits.h).
#include "routing/router_logits.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/detach.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "common/autograd.h"
#include "common/check.h"
#include "common/ops/routing.h"
#include "common/register.h"
#include "common/tensor.h"
#include "gemm/generic/dense_gemm.h"

namespace transformer_plugin::routing {
namespace {

using at::Tensor;
using gemm::sum_dtype;
using gemm::transposed_view;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using TwoTensors = std::tuple<Tensor, Tensor>;

constexpr const char *kOp = "router_logits", *kWithTokensOp = "router_logits_with_tokens",
                     *kBackwardOp = "router_logits_backward";

void check_operands(const char* op, const Tensor& input, const Tensor& weight) {
  const Argument input_argument{op, "input", input}, weight_argument{op, "weight", weight};
  check_dtype(input_argument, {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble});
  check_dim(input_argument, 2);
  check_strided(weight_argument);
  check_same_dtype(weight_argument, input_argument);
  check_dim(weight_argument, 2);
  check_same_device(weight_argument, input_argument);
  check_size(weight_argument, 1, input.sym_size(1), "the columns of 'input'");
}

Tensor router_logits_output(const Tensor& input, const Tensor& weight) {
  check_operands(kOp, input, weight);
  return empty(input, {input.sym_size(0), weight.sym_size(0)}, sum_dtype(input.scalar_type()));
}

void check_backward(const Tensor& grad, const Tensor& input, const Tensor& weight, bool for_input,
                    OptionalTensorArg grad_tokens) {
  check_operands(kBackwardOp, input, weight);
  const Argument grad_argument{kBackwardOp, "grad", grad}, input_argument{kBackwardOp, "input", input};
  check_dtype(grad_argument, {sum_dtype(input.scalar_type())});
  check_dim(grad_argument, 2);
  check_same_device(grad_argument, input_argument);
  check_size(grad_argument, 0, input.sym_size(0), "the rows of 'input'");
  check_size(grad_argument, 1, weight.sym_size(0), "the rows of 'weight'");
  if (!grad_tokens) return;
  const Argument tokens_argument{kBackwardOp, "grad_tokens", *grad_tokens};
  check_dtype(tokens_argument, {input.scalar_type()});
  check_dim(tokens_argument, 2);
  check_same_device(tokens_argument, input_argument);
  check_size(tokens_argument, 0, input.sym_size(0), "the rows of 'input'");
  check_size(tokens_argument, 1, input.sym_size(1), "the columns of 'input'");
  TP_CHECK_VALUE(for_input, kBackwardOp, "grad_tokens", "None without the gradient of 'input'",
                 describe(*grad_tokens), "Pass for_input=True");
}

// A gradient that was not asked for.
Tensor no_gradient(const Tensor& like) { return empty(like, {0}, like.scalar_type()); }

TwoTensors router_logits_backward_meta(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                       bool for_input, bool for_weight, OptionalTensorArg grad_tokens) {
  check_backward(grad, input, weight, for_input, grad_tokens);
  const auto alike = [](const Tensor& like) { return empty(like, like.sym_sizes(), like.scalar_type()); };
  return {for_input ? alike(input) : no_gradient(input), for_weight ? alike(weight) : no_gradient(weight)};
}

Tensor router_logits(const Tensor& input, const Tensor& weight) {
  check_operands(kOp, input, weight);
  const BelowAutograd guard;
  return gemm::dense_gemm(input, transposed_view(weight), std::nullopt, sum_dtype(input.scalar_type()));
}

// a @ b, plus `addend` if it is defined, in whose memory the result then is. Rounded once,
// but cuBLAS rounds a bfloat16 product before it adds.
Tensor product(const Tensor& a, const Tensor& b, at::ScalarType dtype, const Tensor& addend = {}) {
  if (!addend.defined()) return gemm::dense_gemm(a, b, std::nullopt, dtype);
  gemm::dense_gemm_out(a, b, std::nullopt, std::nullopt, std::nullopt, addend, /*accumulate=*/true);
  return addend;
}

uint16_t* bits_of(const Tensor& tensor) { return static_cast<uint16_t*>(tensor.mutable_data_ptr()); }

struct Parts {
  Tensor grad;          // [tokens, 2 experts]
  Tensor weight_twice;  // [2 experts, hidden], if asked for
};

Parts split_gradient(const Tensor& grad, const Tensor& weight, bool with_weight) {
  const int64_t tokens = grad.size(0), experts = grad.size(1), hidden = weight.size(1);
  const Tensor g = grad.contiguous(), w = with_weight ? weight.contiguous() : Tensor();
  Parts parts{empty(weight, {tokens, 2 * experts}, at::kBFloat16), Tensor()};
  SplitGradientArgs args{
      g.const_data_ptr<float>(), bits_of(parts.grad), nullptr, nullptr, tokens, experts, hidden};
  if (with_weight) {
    parts.weight_twice = empty(weight, {2 * experts, hidden}, at::kBFloat16);
    args.weight = static_cast<const uint16_t*>(w.const_data_ptr());
    args.weight_twice = bits_of(parts.weight_twice);
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (g.is_cuda()) {
    const CudaScope scope(g);
    launch_split_gradient(args, scope.stream());
    return parts;
  }
#endif
  split_gradient_cpu(args);
  return parts;
}

// sums [2 experts, hidden] to the gradient of the weight.
Tensor add_halves(const Tensor& sums, const Tensor& weight) {
  const Tensor output = empty(weight, weight.sym_sizes(), at::kBFloat16);
  const AddHalvesArgs args{sums.const_data_ptr<float>(), output.mutable_data_ptr(), output.numel()};
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (sums.is_cuda()) {
    const CudaScope scope(sums);
    launch_add_halves(args, scope.stream());
    return output;
  }
#endif
  add_halves_cpu(args);
  return output;
}

Tensor weight_gradient(const Parts& parts, const Tensor& input, const Tensor& weight) {
  return add_halves(product(transposed_view(parts.grad), input, at::kFloat), weight);
}

TwoTensors gradients_from_parts(const Tensor& grad, const Tensor& input, const Tensor& weight, bool for_input,
                                bool for_weight, const Tensor& addend) {
  TwoTensors results{no_gradient(input), no_gradient(weight)};
  if (!for_input && !for_weight) return results;
  auto& [grad_input, grad_weight] = results;
  const Parts parts = split_gradient(grad, weight, for_input);
  if (for_input) grad_input = product(parts.grad, parts.weight_twice, at::kBFloat16, addend);
  if (for_weight) grad_weight = weight_gradient(parts, input, weight);
  return results;
}

// FP16 operands are converted, because parts in FP16 would underflow.
TwoTensors wide_gradients(const Tensor& grad, const Tensor& input, const Tensor& weight, bool for_input,
                          bool for_weight, const Tensor& addend) {
  TwoTensors results{no_gradient(input), no_gradient(weight)};
  auto& [grad_input, grad_weight] = results;
  const at::ScalarType dtype = input.scalar_type(), wide = grad.scalar_type();
  if (for_input) grad_input = product(grad, weight.to(wide), dtype, addend);
  if (for_weight) grad_weight = product(transposed_view(grad), input.to(wide), dtype);
  return results;
}

// `addend`: what is added to the gradient of the input, which is written into its memory; or undefined.
TwoTensors gradients_below_autograd(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                    bool for_input, bool for_weight, const Tensor& addend) {
  const BelowAutograd guard;
  const auto gradients = input.scalar_type() == at::kBFloat16 ? &gradients_from_parts : &wide_gradients;
  return gradients(grad, input, weight, for_input, for_weight, addend);
}

TwoTensors router_logits_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                  bool for_input, bool for_weight, OptionalTensorArg grad_tokens) {
  check_backward(grad, input, weight, for_input, grad_tokens);
  const Tensor addend = grad_tokens ? at::clone(*grad_tokens, at::MemoryFormat::Contiguous) : Tensor();
  return gradients_below_autograd(grad, input, weight, for_input, for_weight, addend);
}

TwoTensors call_backward(const Tensor& grad, const Tensor& input, const Tensor& weight, bool for_input,
                         bool for_weight, OptionalTensorArg grad_tokens = std::nullopt) {
  return ops::router_logits_backward(grad, input, weight, for_input, for_weight, grad_tokens);
}

Tensor call_router_logits(const Tensor& input, const Tensor& weight) {
  return ops::router_logits(input, weight);
}

class RouterLogitsFunction : public DifferentiableOnce<RouterLogitsFunction> {
 public:
  static constexpr const char* kName = "router_logits";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight) {
    ctx->save_for_backward({input, weight});
    const BelowAutograd guard;
    return call_router_logits(input, weight);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const bool for_input = ctx->needs_input_grad(0), for_weight = ctx->needs_input_grad(1);
    const auto [grad_input, grad_weight] = call_backward(grads[0], saved[0], saved[1], for_input, for_weight);
    return {for_input ? grad_input : Tensor(), for_weight ? grad_weight : Tensor()};
  }
};

Tensor router_logits_autograd(const Tensor& input, const Tensor& weight) {
  if (any_requires_grad(input, weight)) return RouterLogitsFunction::apply(input, weight);
  const BelowAutograd guard;
  return call_router_logits(input, weight);
}

// Whether nothing else refers to a gradient, so that its memory may hold the result. autograd asks the same
// before it adds gradients in place. Tracers and modes such as the counter of FLOPs are to see an op.
bool is_unshared(const Tensor& grad) {
  return grad.use_count() == 1 && has_memory(grad) && grad.has_storage() && grad.storage().use_count() == 1 &&
         grad.is_contiguous() && !grad.requires_grad() && !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

// A tensor whose gradient another node has: no edge leads to it from here. It is saved with its graph, so that second derivatives
// are refused.
struct WithoutEdge {
  const Tensor& tensor;
};

// What the weight's node has made of the gradient that it passes on, until the input's node takes it: the kernel then runs once.
struct PassedOn {
  Tensor grad;
  Parts parts;
};
thread_local PassedOn passed_on;

bool are_in_memory(std::initializer_list<Tensor> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), has_memory) &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

// The node of the input. Torch's schedules that delay the gradients of weights add up the gradients of all outputs of a node
// that has a weight, so the weight has a node of its own, with one output, above this one.
class RouterLogitsWithTokensFunction : public DifferentiableOnce<RouterLogitsWithTokensFunction> {
 public:
  static constexpr const char* kName = "router_logits_with_tokens";
  static constexpr bool is_traceable = true;

  // torch returns a view of an input that is an output.
  static variable_list forward(AutogradContext* ctx, const Tensor& input, const WithoutEdge& weight) {
    ctx->save_for_backward({input, weight.tensor});
    ctx->set_materialize_grads(false);
    const BelowAutograd guard;
    return {call_router_logits(input, weight.tensor), input};
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const Tensor &grad = grads[0], &grad_tokens = grads[1];
    if (!grad.defined()) return {grad_tokens, Tensor()};
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &input = saved[0], &weight = saved[1];
    const PassedOn made = std::exchange(passed_on, {});
    const bool in_place = grad_tokens.defined() && is_unshared(grad_tokens) && has_memory(grad) &&
                          has_memory(input) && has_memory(weight);
    if (in_place) check_backward(grad, input, weight, true, grad_tokens);
    if (made.grad.is_same(grad) && (in_place || !grad_tokens.defined())) {
      const BelowAutograd guard;
      return {product(made.parts.grad, made.parts.weight_twice, at::kBFloat16, grad_tokens), Tensor()};
    }
    return {std::get<0>(in_place ? gradients_below_autograd(grad, input, weight, true, false, grad_tokens)
                                 : call_backward(grad, input, weight, true, false, as_optional(grad_tokens))),
            Tensor()};
  }
};

// The node of the weight: passes the gradient of the logits on.
class RouterWeightFunction : public DifferentiableOnce<RouterWeightFunction> {
 public:
  static constexpr const char* kName = "router_logits_with_tokens";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& logits, const Tensor& weight,
                        const WithoutEdge& input) {
    ctx->save_for_backward({input.tensor, weight});
    ctx->set_materialize_grads(false);
    const BelowAutograd guard;
    return at::detach(logits);  // for an input that is an output torch would make a view
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const Tensor& grad = grads[0];
    if (!grad.defined() || !ctx->needs_input_grad(1)) return {grad, Tensor(), Tensor()};
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &input = saved[0], &weight = saved[1];
    if (!are_in_memory({grad, input, weight})) {
      return {grad, std::get<1>(call_backward(grad, input, weight, false, true)), Tensor()};
    }
    check_backward(grad, input, weight, false, std::nullopt);
    if (weight.scalar_type() != at::kBFloat16 || !ctx->needs_input_grad(0)) {
      return {grad, std::get<1>(gradients_below_autograd(grad, input, weight, false, true, Tensor())),
              Tensor()};
    }
    const BelowAutograd guard;
    passed_on = {grad, split_gradient(grad, weight, true)};
    return {grad, weight_gradient(passed_on.parts, input, weight), Tensor()};
  }
};

// Without a gradient of the input the tokens are the input itself, unless its memory holds negated values.
TwoTensors router_logits_with_tokens(const Tensor& given, const Tensor& weight) {
  check_operands(kWithTokensOp, given, weight);
  const Tensor input = given.resolve_neg();
  if (!any_requires_grad(input)) return {call_router_logits(input, weight), input};
  const variable_list results = RouterLogitsWithTokensFunction::apply(input, WithoutEdge{weight});
  if (!any_requires_grad(weight)) return {results[0], results[1]};
  return {RouterWeightFunction::apply(results[0], weight, WithoutEdge{input}), results[1]};
}

}  // namespace

TP_IMPL(router_logits, router_logits, router_logits_output, router_logits_autograd);
// router_logits_backward has no Autograd registration.
TP_IMPL_CPU_CUDA(router_logits_backward, router_logits_backward);
TP_IMPL_FOR(Meta, router_logits_backward, router_logits_backward_meta);
// One function for all backends, above autograd: tracers see router_logits, and a view of the input.
TP_IMPL_FOR(CompositeImplicitAutograd, router_logits_with_tokens, router_logits_with_tokens);

}  // namespace transformer_plugin::routing
