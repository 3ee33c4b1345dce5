// topk_router and topk_router_backward: checks, kernel arguments and the gradient (routing/topk_router.h).
#include "routing/topk_router.h"

#include "common/autograd.h"
#include "common/register.h"
#include "common/tensor.h"
#include "routing/score_name.h"

namespace transformer_plugin::routing {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalInt = std::optional<int64_t>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Routed = std::tuple<Tensor, Tensor>;  // weights, indices

void check_function(const char* op, ScoreFunction function, bool pre_softmax) {
  TP_CHECK_VALUE(!pre_softmax || function == ScoreFunction::kSoftmax, op, "pre_softmax",
                 "False with this score function", "True",
                 "Only the softmax can come before or after the choice");
}

void check_groups(const char* op, const c10::SymInt& experts, int64_t topk, int64_t groups,
                  int64_t group_topk, OptionalInt group_score_topk) {
  TP_CHECK_VALUE(topk >= 1 && experts >= topk, op, "topk", "from 1 to the " << experts << " experts", topk,
                 "Choose that many experts for each token");
  TP_CHECK_VALUE(groups >= 1 && experts % groups == 0, op, "num_groups",
                 "a number that divides the " << experts << " experts", groups, "Pass 1 for no groups");
  TP_CHECK_VALUE(group_topk >= 1 && group_topk <= groups, op, "group_topk",
                 "from 1 to the " << groups << " groups", group_topk,
                 "Choose that many groups for each token");
  const int64_t least = group_score_topk ? 1 : group_topk;
  TP_CHECK_VALUE(topk >= least && experts / groups * group_topk >= topk, op, "topk",
                 "from " << least << (group_score_topk ? "" : ", one for each chosen group,") << " to the "
                         << experts / groups * group_topk << " experts of the chosen groups",
                 topk, "Change topk, num_groups or group_topk");
  TP_CHECK_VALUE(!group_score_topk || (*group_score_topk >= 1 && experts / groups >= *group_score_topk), op,
                 "group_score_topk", "None or from 1 to the " << experts / groups << " experts of a group",
                 *group_score_topk, "Pass 1 for DeepSeek-V2, 2 for DeepSeek-V3, None for topk / group_topk");
}

// Checks the arguments and allocates the outputs, for every backend.
Routed topk_router_outputs(const Tensor& logits, const OptionalTensor& bias, int64_t topk,
                           std::string_view name, bool pre_softmax, int64_t groups, int64_t group_topk,
                           double scaling, OptionalInt group_score_topk) {
  constexpr const char* op = "topk_router";
  const Argument logits_argument{op, "logits", logits};
  check_logits(logits_argument, kMaxExperts);
  const ScoreFunction function = parse_score_function(op, name);
  check_function(op, function, pre_softmax);
  check_groups(op, logits.sym_size(1), topk, groups, group_topk, group_score_topk);
  if (bias) {
    const Argument bias_argument{op, "expert_bias", *bias};
    TP_CHECK_VALUE(function != ScoreFunction::kSoftmax, op, "expert_bias", "None with the softmax",
                   describe(*bias),
                   "A bias of the choice goes with scores that do not compete: sigmoid or sqrtsoftplus");
    check_dtype(bias_argument, {at::kFloat});
    check_dim(bias_argument, 1);
    check_size(bias_argument, 0, logits.sym_size(1), "the columns of 'logits'");
    check_same_device(bias_argument, logits_argument);
  }
  return {empty(logits, {logits.sym_size(0), topk}, at::kFloat),
          empty(logits, {logits.sym_size(0), topk}, at::kInt)};
}

Routed topk_router(const Tensor& logits, const OptionalTensor& bias, int64_t topk, std::string_view name,
                   bool pre_softmax, int64_t groups, int64_t group_topk, double scaling,
                   OptionalInt group_score_topk) {
  auto outputs = topk_router_outputs(logits, bias, topk, name, pre_softmax, groups, group_topk, scaling,
                                     group_score_topk);
  const auto& [weights, indices] = outputs;
  const Tensor x = logits.contiguous();
  const Tensor b = bias ? bias->contiguous() : Tensor();
  const TopkRouterArgs args{x.const_data_ptr(),
                            bias ? b.const_data_ptr<float>() : nullptr,
                            weights.mutable_data_ptr<float>(),
                            indices.mutable_data_ptr<int32_t>(),
                            x.size(0),
                            x.size(1),
                            topk,
                            groups,
                            group_topk,
                            group_score_topk.value_or(topk / group_topk),
                            scaling,
                            parse_score_function("", name),
                            pre_softmax,
                            to_dtype(x.scalar_type())};
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (x.is_cuda()) {
    const CudaScope scope(x);
    launch_topk_router(args, scope.stream());
    return outputs;
  }
#endif
  topk_router_cpu(args);
  return outputs;
}

Tensor topk_router_backward_output(const Tensor& grad, const Tensor& logits, const Tensor& indices,
                                   std::string_view name, bool pre_softmax, double scaling) {
  constexpr const char* op = "topk_router_backward";
  const Argument grad_argument{op, "grad", grad};
  const Argument logits_argument{op, "logits", logits};
  const Argument indices_argument{op, "indices", indices};
  check_logits(logits_argument, kMaxExperts);
  check_function(op, parse_score_function(op, name), pre_softmax);
  check_dtype(grad_argument, {at::kFloat});
  check_dim(grad_argument, 2);
  check_same_device(grad_argument, logits_argument);
  check_size(grad_argument, 0, logits.sym_size(0), "the rows of 'logits'");
  TP_CHECK_VALUE(grad.sym_size(1) >= 1 && grad.sym_size(1) <= kMaxExperts, op, "grad",
                 "from 1 to " << kMaxExperts << " columns", describe(grad),
                 "Pass the gradient of the weights");
  check_dtype(indices_argument, {at::kInt});
  check_dim(indices_argument, 2);
  check_same_device(indices_argument, logits_argument);
  check_size(indices_argument, 0, grad.sym_size(0), "the rows of 'grad'");
  check_size(indices_argument, 1, grad.sym_size(1), "the columns of 'grad'");
  return empty(logits, logits.sym_sizes(), logits.scalar_type());
}

Tensor topk_router_backward(const Tensor& grad, const Tensor& logits, const Tensor& indices,
                            std::string_view name, bool pre_softmax, double scaling) {
  const Tensor output = topk_router_backward_output(grad, logits, indices, name, pre_softmax, scaling);
  const Tensor g = grad.contiguous();
  const Tensor x = logits.contiguous();
  const Tensor i = indices.contiguous();
  const TopkRouterBackwardArgs args{g.const_data_ptr<float>(),
                                    x.const_data_ptr(),
                                    i.const_data_ptr<int32_t>(),
                                    output.mutable_data_ptr(),
                                    x.size(0),
                                    x.size(1),
                                    g.size(1),
                                    scaling,
                                    parse_score_function("", name),
                                    pre_softmax,
                                    to_dtype(x.scalar_type())};
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (x.is_cuda()) {
    const CudaScope scope(x);
    launch_topk_router_backward(args, scope.stream());
    return output;
  }
#endif
  topk_router_backward_cpu(args);
  return output;
}

Routed call_topk_router(const Tensor& logits, const OptionalTensor& bias, int64_t topk, std::string_view name,
                        bool pre_softmax, int64_t groups, int64_t group_topk, double scaling,
                        OptionalInt group_score_topk) {
  using Signature = Routed(const Tensor&, const OptionalTensor&, int64_t, std::string_view, bool, int64_t,
                           int64_t, double, OptionalInt);
  static const auto op = find_op<Signature>("topk_router");
  return op.call(logits, bias, topk, name, pre_softmax, groups, group_topk, scaling, group_score_topk);
}

class TopkRouterFunction : public DifferentiableOnce<TopkRouterFunction> {
 public:
  static constexpr const char* kName = "topk_router";
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& logits, const OptionalTensor& bias,
                               int64_t topk, std::string_view name, bool pre_softmax, int64_t groups,
                               int64_t group_topk, double scaling, OptionalInt group_score_topk) {
    const BelowAutograd guard;
    const auto [weights, indices] = call_topk_router(logits, bias, topk, name, pre_softmax, groups,
                                                     group_topk, scaling, group_score_topk);
    ctx->save_for_backward({logits, indices});
    ctx->saved_data["score_function"] = std::string(name);
    ctx->saved_data["pre_softmax"] = pre_softmax;
    ctx->saved_data["scaling_factor"] = scaling;
    ctx->mark_non_differentiable({indices});
    ctx->set_materialize_grads(false);
    return {weights, indices};
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(9);
    if (!grads[0].defined()) return result;
    using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, std::string_view, bool, double);
    static const auto op = find_op<Signature>("topk_router_backward");
    const variable_list saved = ctx->get_saved_variables();
    const std::string name = ctx->saved_data["score_function"].toStringRef();
    result[0] = op.call(grads[0], saved[0], saved[1], name, ctx->saved_data["pre_softmax"].toBool(),
                        ctx->saved_data["scaling_factor"].toDouble());
    return result;
  }
};

Routed topk_router_autograd(const Tensor& logits, const OptionalTensor& bias, int64_t topk,
                            std::string_view name, bool pre_softmax, int64_t groups, int64_t group_topk,
                            double scaling, OptionalInt group_score_topk) {
  if (any_wants_grad(logits)) {
    const variable_list out = TopkRouterFunction::apply(logits, bias, topk, name, pre_softmax, groups,
                                                        group_topk, scaling, group_score_topk);
    return {out[0], out[1]};
  }
  const BelowAutograd guard;
  return call_topk_router(logits, bias, topk, name, pre_softmax, groups, group_topk, scaling,
                          group_score_topk);
}

}  // namespace

TP_IMPL("topk_router", topk_router, topk_router_outputs, topk_router_autograd);
// topk_router_backward has no Autograd registration.
TP_IMPL_CPU_CUDA("topk_router_backward", topk_router_backward);
TP_IMPL_FOR(Meta, "topk_router_backward", topk_router_backward_output);

}  // namespace transformer_plugin::routing
