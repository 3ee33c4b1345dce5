// aux_loss and aux_loss_backward: checks, kernel arguments and the gradient (routing/aux_loss.h).
#include "routing/aux_loss.h"

#include "common/autograd.h"
#include "common/check.h"
#include "common/ops/routing.h"
#include "common/register.h"
#include "common/tensor.h"

namespace transformer_plugin::routing {
namespace {

using at::Tensor;
using c10::SymInt;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void check_counts(const Argument& data, const Tensor& counts, const Tensor& total, int64_t topk) {
  const Argument counts_argument{data.op, "tokens_per_expert", counts};
  const Argument total_argument{data.op, "total_tokens", total};
  check_dtype(counts_argument, {at::kLong});
  check_dim(counts_argument, 1);
  check_same_device(counts_argument, data);
  check_dtype(total_argument, {at::kLong});
  check_same_device(total_argument, data);
  TP_CHECK_VALUE(total.sym_numel() == 1, data.op, "total_tokens", "one element", describe(total),
                 "Pass the number of tokens that were routed");
  TP_CHECK_VALUE(topk >= 1, data.op, "topk", "1 or more", topk, "Pass the experts of each token");
}

Tensor aux_loss_output(const Tensor& scores, const Tensor& counts, const Tensor& total, int64_t topk,
                       double coeff) {
  const Argument scores_argument{"aux_loss", "scores", scores};
  check_dtype(scores_argument, {at::kFloat});
  check_dim(scores_argument, 2);
  check_counts(scores_argument, counts, total, topk);
  check_size({"aux_loss", "tokens_per_expert", counts}, 0, scores.sym_size(1), "the columns of 'scores'");
  return empty(scores, {}, at::kFloat);
}

Tensor aux_loss_backward_output(const Tensor& grad, const Tensor& counts, const Tensor& total, SymInt tokens,
                                int64_t topk, double coeff) {
  constexpr const char* op = "aux_loss_backward";
  const Argument grad_argument{op, "grad", grad};
  check_dtype(grad_argument, {at::kFloat});
  TP_CHECK_VALUE(grad.sym_numel() == 1, op, "grad", "one element", describe(grad),
                 "Pass the gradient of the loss");
  check_counts(grad_argument, counts, total, topk);
  TP_CHECK_VALUE(tokens >= 0, op, "tokens", "0 or more", tokens, "Pass the rows of 'scores'");
  return empty(grad, {tokens, counts.sym_size(0)}, at::kFloat);
}

Tensor aux_loss(const Tensor& scores, const Tensor& counts, const Tensor& total, int64_t topk, double coeff) {
  const Tensor loss = aux_loss_output(scores, counts, total, topk, coeff);
  const Tensor s = scores.contiguous();
  const Tensor c = counts.contiguous();
  const int64_t chunks = (s.size(0) + kChunk - 1) / kChunk;
  const Tensor sums = empty(s, {chunks, s.size(1)}, at::kFloat);
  const AuxLossArgs args{s.const_data_ptr<float>(),
                         c.const_data_ptr<int64_t>(),
                         total.const_data_ptr<int64_t>(),
                         loss.mutable_data_ptr<float>(),
                         sums.mutable_data_ptr<float>(),
                         s.size(0),
                         s.size(1),
                         chunks,
                         topk,
                         coeff};
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (s.is_cuda()) {
    const CudaScope scope(s);
    launch_aux_loss(args, scope.stream());
    return loss;
  }
#endif
  aux_loss_cpu(args);
  return loss;
}

Tensor aux_loss_backward(const Tensor& grad, const Tensor& counts, const Tensor& total, int64_t tokens,
                         int64_t topk, double coeff) {
  const Tensor output = aux_loss_backward_output(grad, counts, total, tokens, topk, coeff);
  const Tensor c = counts.contiguous();
  const AuxLossBackwardArgs args{grad.const_data_ptr<float>(),
                                 c.const_data_ptr<int64_t>(),
                                 total.const_data_ptr<int64_t>(),
                                 output.mutable_data_ptr<float>(),
                                 tokens,
                                 c.size(0),
                                 topk,
                                 coeff};
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (grad.is_cuda()) {
    const CudaScope scope(grad);
    launch_aux_loss_backward(args, scope.stream());
    return output;
  }
#endif
  aux_loss_backward_cpu(args);
  return output;
}

Tensor call_aux_loss(const Tensor& scores, const Tensor& counts, const Tensor& total, int64_t topk,
                     double coeff) {
  return ops::aux_loss(scores, counts, total, topk, coeff);
}

class AuxLossFunction : public DifferentiableOnce<AuxLossFunction> {
 public:
  static constexpr const char* kName = "aux_loss";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& scores, const Tensor& counts, const Tensor& total,
                        int64_t topk, double coeff) {
    ctx->save_for_backward({counts, total});
    ctx->saved_data["tokens"] = scores.sym_size(0);
    ctx->saved_data["topk"] = topk;
    ctx->saved_data["coeff"] = coeff;
    const BelowAutograd guard;
    return call_aux_loss(scores, counts, total, topk, coeff);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    return {ops::aux_loss_backward(grads[0], saved[0], saved[1], ctx->saved_data["tokens"].toSymInt(),
                                   ctx->saved_data["topk"].toInt(), ctx->saved_data["coeff"].toDouble()),
            Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

Tensor aux_loss_autograd(const Tensor& scores, const Tensor& counts, const Tensor& total, int64_t topk,
                         double coeff) {
  if (any_requires_grad(scores)) return AuxLossFunction::apply(scores, counts, total, topk, coeff);
  const BelowAutograd guard;
  return call_aux_loss(scores, counts, total, topk, coeff);
}

}  // namespace

TP_IMPL(aux_loss, aux_loss, aux_loss_output, aux_loss_autograd);
// aux_loss_backward has no Autograd registration.
TP_IMPL_CPU_CUDA(aux_loss_backward, aux_loss_backward);
TP_IMPL_FOR(Meta, aux_loss_backward, aux_loss_backward_output);

}  // namespace transformer_plugin::routing
