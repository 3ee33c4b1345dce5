// topk_router, topk_router_with_load and topk_router_backward: checks, kernel arguments and the gradient
// (routing/topk_router.h).
#include "routing/topk_router.h"

#include "common/autograd.h"
#include "common/expert_index.h"
#include "common/ops/routing.h"
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

// Both ops have these arguments.
struct RouterCall {
  const char* op;
  const Tensor& logits;
  const OptionalTensor& bias;
  int64_t topk;
  std::string_view name;
  bool pre_softmax;
  int64_t groups, group_topk;
  double scaling;
  OptionalInt group_score_topk;
};

struct Routed {
  Tensor weights, indices;
  Tensor load, aux_loss;  // undefined without load
};

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
Routed checked_outputs(const RouterCall& call, bool with_load) {
  const Tensor& logits = call.logits;
  const Argument logits_argument{call.op, "logits", logits};
  check_logits(logits_argument, kMaxExperts);
  const ScoreFunction function = parse_score_function(call.op, call.name);
  check_function(call.op, function, call.pre_softmax);
  check_groups(call.op, logits.sym_size(1), call.topk, call.groups, call.group_topk, call.group_score_topk);
  if (call.bias) {
    const Argument bias_argument{call.op, "expert_bias", *call.bias};
    TP_CHECK_VALUE(function != ScoreFunction::kSoftmax, call.op, "expert_bias", "None with the softmax",
                   describe(*call.bias),
                   "A bias of the choice goes with scores that do not compete: sigmoid or sqrtsoftplus");
    check_dtype(bias_argument, {at::kFloat});
    check_dim(bias_argument, 1);
    check_size(bias_argument, 0, logits.sym_size(1), "the columns of 'logits'");
    check_same_device(bias_argument, logits_argument);
  }
  return {empty(logits, {logits.sym_size(0), call.topk}, at::kFloat),
          empty(logits, {logits.sym_size(0), call.topk}, at::kInt),
          with_load ? empty(logits, {logits.sym_size(1)}, at::kLong) : Tensor(),
          with_load ? empty(logits, {}, at::kFloat) : Tensor()};
}

Routed route(const RouterCall& call, bool with_load) {
  Routed routed = checked_outputs(call, with_load);
  const Tensor x = call.logits.contiguous();
  const Tensor b = call.bias ? call.bias->contiguous() : Tensor();
  const TopkRouterArgs args{x.const_data_ptr(),
                            call.bias ? b.const_data_ptr<float>() : nullptr,
                            routed.weights.mutable_data_ptr<float>(),
                            routed.indices.mutable_data_ptr<int32_t>(),
                            x.size(0),
                            x.size(1),
                            call.topk,
                            call.groups,
                            call.group_topk,
                            call.group_score_topk.value_or(call.topk / call.group_topk),
                            call.scaling,
                            parse_score_function("", call.name),
                            call.pre_softmax,
                            to_dtype(x.scalar_type()),
                            with_load ? routed.load.mutable_data_ptr<int64_t>() : nullptr,
                            with_load ? routed.aux_loss.mutable_data_ptr<float>() : nullptr};
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (x.is_cuda()) {
    const CudaScope scope(x);
    launch_topk_router(args, scope.stream());
    return routed;
  }
#endif
  topk_router_cpu(args);
  return routed;
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
                                    to_dtype(x.scalar_type()),
                                    check_expert_indices({"topk_router_backward", "indices", i}, x.size(1))};
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

// What distinguishes the two ops: the name, and the results as the schema has them.
struct WithoutLoad {
  static constexpr const char* kName = "topk_router";
  static constexpr auto op = ops::topk_router;
  static constexpr bool kWithLoad = false;
  using Results = std::tuple<Tensor, Tensor>;
  static Results results(Routed&& routed) { return {routed.weights, routed.indices}; }
  static Routed routed(Results&& results) {
    return {std::get<0>(results), std::get<1>(results), Tensor(), Tensor()};
  }
};

struct WithLoad {
  static constexpr const char* kName = "topk_router_with_load";
  static constexpr auto op = ops::topk_router_with_load;
  static constexpr bool kWithLoad = true;
  using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;
  static Results results(Routed&& routed) {
    return {routed.weights, routed.indices, routed.load, routed.aux_loss};
  }
  static Routed routed(Results&& results) {
    auto& [weights, indices, load, aux_loss] = results;
    return {weights, indices, load, aux_loss};
  }
};

// Calls the op below autograd.
template <typename Op>
Routed redispatch(const RouterCall& call) {
  const BelowAutograd guard;
  return Op::routed(Op::op(call.logits, call.bias, call.topk, call.name, call.pre_softmax, call.groups,
                           call.group_topk, call.scaling, call.group_score_topk));
}

// Load and auxiliary loss have no gradient.
template <typename Op>
class TopkRouterFunction : public DifferentiableOnce<TopkRouterFunction<Op>> {
 public:
  static constexpr const char* kName = Op::kName;
  static constexpr bool is_traceable = true;

  // The tensors are those of `call`, which torch looks for among the arguments.
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, const OptionalTensor& /*bias*/,
                               const RouterCall& call) {
    const auto [weights, indices, load, aux_loss] = redispatch<Op>(call);
    ctx->save_for_backward({logits, indices});
    ctx->saved_data["score_function"] = std::string(call.name);
    ctx->saved_data["pre_softmax"] = call.pre_softmax;
    ctx->saved_data["scaling_factor"] = call.scaling;
    ctx->set_materialize_grads(false);
    if constexpr (!Op::kWithLoad) {
      ctx->mark_non_differentiable({indices});
      return {weights, indices};
    }
    ctx->mark_non_differentiable({indices, load, aux_loss});
    return {weights, indices, load, aux_loss};
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(3);
    if (!grads[0].defined()) return result;
    const variable_list saved = ctx->get_saved_variables();
    const std::string name = ctx->saved_data["score_function"].toStringRef();
    result[0] =
        ops::topk_router_backward(grads[0], saved[0], saved[1], name, ctx->saved_data["pre_softmax"].toBool(),
                                  ctx->saved_data["scaling_factor"].toDouble());
    return result;
  }
};

template <typename Op>
Routed kernel(const RouterCall& call) {
  return route(call, Op::kWithLoad);
}

template <typename Op>
Routed meta(const RouterCall& call) {
  return checked_outputs(call, Op::kWithLoad);
}

template <typename Op>
Routed autograd(const RouterCall& call) {
  if (!any_requires_grad(call.logits)) return redispatch<Op>(call);
  const variable_list out = TopkRouterFunction<Op>::apply(call.logits, call.bias, call);
  if constexpr (Op::kWithLoad) return {out[0], out[1], out[2], out[3]};
  return {out[0], out[1], Tensor(), Tensor()};
}

template <typename Op, Routed (*run)(const RouterCall&)>
typename Op::Results entry_of(const Tensor& logits, const OptionalTensor& bias, int64_t topk,
                              std::string_view name, bool pre_softmax, int64_t groups, int64_t group_topk,
                              double scaling, OptionalInt group_score_topk) {
  return Op::results(
      run({Op::kName, logits, bias, topk, name, pre_softmax, groups, group_topk, scaling, group_score_topk}));
}

}  // namespace

TP_IMPL(topk_router, (entry_of<WithoutLoad, kernel<WithoutLoad>>), (entry_of<WithoutLoad, meta<WithoutLoad>>),
        (entry_of<WithoutLoad, autograd<WithoutLoad>>));
TP_IMPL(topk_router_with_load, (entry_of<WithLoad, kernel<WithLoad>>), (entry_of<WithLoad, meta<WithLoad>>),
        (entry_of<WithLoad, autograd<WithLoad>>));
// topk_router_backward has no Autograd registration.
TP_IMPL_CPU_CUDA(topk_router_backward, topk_router_backward);
TP_IMPL_FOR(Meta, topk_router_backward, topk_router_backward_output);

}  // namespace transformer_plugin::routing
