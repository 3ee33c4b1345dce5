// router_scores and router_scores_backward: checks, kernel arguments and the gradient
// (routing/router_scores.h).
#include "routing/router_scores.h"

#include <limits>

#include "common/autograd.h"
#include "common/ops/routing.h"
#include "common/register.h"
#include "common/tensor.h"
#include "routing/score_name.h"

namespace transformer_plugin::routing {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kAnyExperts = std::numeric_limits<int32_t>::max();

Tensor router_scores_output(const Tensor& logits, std::string_view name) {
  check_logits({"router_scores", "logits", logits}, kAnyExperts);
  parse_score_function("router_scores", name);
  return empty(logits, logits.sym_sizes(), at::kFloat);
}

Tensor router_scores_backward_output(const Tensor& grad, const Tensor& logits, std::string_view name) {
  constexpr const char* op = "router_scores_backward";
  const Argument grad_argument{op, "grad", grad};
  check_logits({op, "logits", logits}, kAnyExperts);
  parse_score_function(op, name);
  check_dtype(grad_argument, {at::kFloat});
  check_dim(grad_argument, 2);
  check_same_device(grad_argument, {op, "logits", logits});
  check_size(grad_argument, 0, logits.sym_size(0), "the rows of 'logits'");
  check_size(grad_argument, 1, logits.sym_size(1), "the columns of 'logits'");
  return empty(logits, logits.sym_sizes(), logits.scalar_type());
}

Tensor router_scores(const Tensor& logits, std::string_view name) {
  const Tensor scores = router_scores_output(logits, name);
  const Tensor x = logits.contiguous();
  const RouterScoresArgs args{
      x.const_data_ptr(), scores.mutable_data_ptr<float>(), x.size(0),
      x.size(1),          parse_score_function("", name),   to_dtype(x.scalar_type())};
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (x.is_cuda()) {
    const CudaScope scope(x);
    launch_router_scores(args, scope.stream());
    return scores;
  }
#endif
  router_scores_cpu(args);
  return scores;
}

Tensor router_scores_backward(const Tensor& grad, const Tensor& logits, std::string_view name) {
  const Tensor output = router_scores_backward_output(grad, logits, name);
  const Tensor g = grad.contiguous();
  const Tensor x = logits.contiguous();
  const RouterScoresBackwardArgs args{g.const_data_ptr<float>(),
                                      x.const_data_ptr(),
                                      output.mutable_data_ptr(),
                                      x.size(0),
                                      x.size(1),
                                      parse_score_function("", name),
                                      to_dtype(x.scalar_type())};
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (x.is_cuda()) {
    const CudaScope scope(x);
    launch_router_scores_backward(args, scope.stream());
    return output;
  }
#endif
  router_scores_backward_cpu(args);
  return output;
}

Tensor call_router_scores(const Tensor& logits, std::string_view name) {
  return ops::router_scores(logits, name);
}

class RouterScoresFunction : public DifferentiableOnce<RouterScoresFunction> {
 public:
  static constexpr const char* kName = "router_scores";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& logits, std::string_view name) {
    ctx->save_for_backward({logits});
    ctx->saved_data["score_function"] = std::string(name);
    const BelowAutograd guard;
    return call_router_scores(logits, name);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const std::string name = ctx->saved_data["score_function"].toStringRef();
    return {ops::router_scores_backward(grads[0], ctx->get_saved_variables()[0], name), Tensor()};
  }
};

Tensor router_scores_autograd(const Tensor& logits, std::string_view name) {
  if (any_requires_grad(logits)) return RouterScoresFunction::apply(logits, name);
  const BelowAutograd guard;
  return call_router_scores(logits, name);
}

}  // namespace

TP_IMPL(router_scores, router_scores, router_scores_output, router_scores_autograd);
// router_scores_backward has no Autograd registration.
TP_IMPL_CPU_CUDA(router_scores_backward, router_scores_backward);
TP_IMPL_FOR(Meta, router_scores_backward, router_scores_backward_output);

}  // namespace transformer_plugin::routing
