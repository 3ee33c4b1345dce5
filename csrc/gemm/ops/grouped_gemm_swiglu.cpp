// grouped_gemm_swiglu: the rows of each group times the group's matrix, then SwiGLU times a probability; with its gradient.
#include <ATen/ops/arange.h>

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/register.h"
#include "common/row_index.h"
#include "common/shared_offsets.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/swiglu_gemm.h"
#include "gemm/ops/calls.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "grouped_gemm_swiglu";

TwoTensors grouped_gemm_swiglu_meta(const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                                    const OptionalTensor& probs, const OptionalTensor& bias,
                                    int64_t interleave, bool keep_input, int64_t max_sms,
                                    int64_t expected_rows, const OptionalTensor& rows) {
  check_swiglu_product(kOp, a, b, group_sizes, probs, bias, interleave, rows, {max_sms, expected_rows});
  const c10::SymInt capacity = (rows ? *rows : a).sym_size(0), columns = b.sym_size(1);
  return {empty(a, {capacity, columns / 2}, a.scalar_type()),
          empty(a, {keep_input ? capacity : c10::SymInt(0), columns}, a.scalar_type())};
}

TwoTensors grouped_gemm_swiglu(const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                               const OptionalTensor& probs, const OptionalTensor& bias, int64_t interleave,
                               bool keep_input, int64_t max_sms, int64_t expected_rows,
                               const OptionalTensor& rows) {
  const LaunchOptions options{max_sms, expected_rows};
  check_swiglu_product(kOp, a, b, group_sizes, probs, bias, interleave, rows, options);
  const BelowAutograd guard;
  const Argument a_argument{kOp, "a", a}, buffer = rows ? Argument{kOp, "rows", *rows} : a_argument;
  const Tensor offsets = group_offsets({kOp, "group_sizes", group_sizes}, buffer, buffer.tensor.size(0));
  if (rows) check_row_entries(buffer, a_argument, offsets);
  return run_gemm_swiglu({a, b, offsets, probs, bias, interleave, keep_input, rows, options});
}

class GroupedGemmSwigluFunction : public DifferentiableOnce<GroupedGemmSwigluFunction> {
 public:
  static constexpr const char* kName = "grouped_gemm_swiglu";
  static constexpr bool is_traceable = true;

  // If h is not kept, the backward recomputes it. h is not marked non-differentiable, because compiled autograd does not support
  // such outputs.
  static variable_list forward(AutogradContext* ctx, const Tensor& a, const Tensor& b,
                               const Tensor& group_sizes, const OptionalTensor& probs,
                               const OptionalTensor& bias, int64_t interleave, bool keep_input,
                               int64_t max_sms, int64_t expected_rows, const OptionalTensor& rows) {
    const bool wants_a = a.requires_grad(), wants_b = b.requires_grad();
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["interleave"] = interleave;
    ctx->saved_data["max_sms"] = max_sms;
    ctx->saved_data["expected_rows"] = expected_rows;
    const BelowAutograd guard;
    const auto [act, h] = call_grouped_gemm_swiglu(a, b, group_sizes, probs, bias, interleave, keep_input,
                                                   {max_sms, expected_rows}, rows);
    if (rows) ctx->saved_data["num_rows"] = a.sym_size(0);
    ctx->set_materialize_grads(false);  // h is rarely used
    ctx->save_for_backward({wants_b || !keep_input ? a : Tensor(), wants_a || !keep_input ? b : Tensor(),
                            group_sizes, keep_input ? h : Tensor(), or_undefined(probs),
                            keep_input ? Tensor() : or_undefined(bias), or_undefined(rows)});
    return {act, h};
  }

  // With zeros past the last group.
  static Tensor before_tail(const Tensor& rows, const Tensor& group_sizes) {
    const Tensor end = group_sizes.clamp_min(0).sum();
    const Tensor index = at::arange(c10::Scalar(rows.sym_size(0)), end.options());
    return rows.masked_fill(index.ge(end), 0.0);
  }

  static LaunchOptions saved_options(AutogradContext* ctx) {
    return {ctx->saved_data["max_sms"].toInt(), ctx->saved_data["expected_rows"].toInt()};
  }

  // The gradients of h and probs. A gradient of the output h is added, if h was kept.
  static TwoTensors gradients_of_swiglu(AutogradContext* ctx, const variable_list& saved,
                                        const variable_list& grads) {
    const Tensor &grad = grads[0], &direct = grads[1], &kept = saved[3];
    const bool has_direct = direct.defined() && kept.defined();
    if (!grad.defined()) return {has_direct ? direct : Tensor(), Tensor()};
    const OptionalTensor none;
    const int64_t interleave = ctx->saved_data["interleave"].toInt();
    const Tensor h = kept.defined()
                         ? kept
                         : call_grouped_gemm(saved[0], saved[1], saved[2], as_optional(saved[5]), none, true,
                                             std::nullopt, none, as_optional(saved[6]), saved_options(ctx));
    using Signature = TwoTensors(const Tensor&, const Tensor&, const OptionalTensor&);
    static const auto swiglu_backward = find_op<Signature>("swiglu_backward");
    const auto [grad_halves, grad_probs] =
        swiglu_backward.call(grad, deinterleave(h, interleave), as_optional(saved[4]));
    const Tensor grad_h = interleave_columns(grad_halves, interleave);
    return {has_direct ? grad_h.add(direct) : grad_h, grad_probs};
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor& sizes = saved[2];
    const SharedOffsets shared(sizes);
    const bool has_probs = saved[4].defined(), has_bias = ctx->saved_data["has_bias"].toBool();
    const auto [grad_h, grad_probs] = gradients_of_swiglu(ctx, saved, grads);
    variable_list result(10);
    if (!grad_h.defined()) return result;
    const OptionalTensor none, rows = as_optional(saved[6]);
    if (ctx->needs_input_grad(0)) {
      result[0] = call_grouped_gemm(grad_h, saved[1], sizes, none, none, false, std::nullopt, none, none,
                                    saved_options(ctx));
      if (rows) {
        result[0] =
            call_gather_rows_backward(result[0], *rows, sizes, ctx->saved_data["num_rows"].toSymInt());
      }
    }
    if (ctx->needs_input_grad(1)) {
      result[1] =
          call_grouped_gemm_wgrad(grad_h, saved[0], sizes, std::nullopt, none, rows, saved_options(ctx));
    }
    // needs_input_grad does not count tensors that are not given.
    if (has_probs && grad_probs.defined() && ctx->needs_input_grad(3)) {
      result[3] = before_tail(grad_probs, sizes);
    }
    if (has_bias && ctx->needs_input_grad(has_probs ? 4 : 3)) {
      result[4] = std::get<0>(call_grouped_bias_backward(grad_h, sizes, none, none));
    }
    return result;
  }
};

TwoTensors grouped_gemm_swiglu_autograd(const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                                        const OptionalTensor& probs, const OptionalTensor& bias,
                                        int64_t interleave, bool keep_input, int64_t max_sms,
                                        int64_t expected_rows, const OptionalTensor& rows) {
  if (any_wants_grad(a, b, probs, bias)) {
    const variable_list made = GroupedGemmSwigluFunction::apply(a, b, group_sizes, probs, bias, interleave,
                                                                keep_input, max_sms, expected_rows, rows);
    return {made[0], made[1]};
  }
  const BelowAutograd guard;
  return call_grouped_gemm_swiglu(a, b, group_sizes, probs, bias, interleave, keep_input,
                                  {max_sms, expected_rows}, rows);
}

}  // namespace

TP_IMPL(kOp, grouped_gemm_swiglu, grouped_gemm_swiglu_meta, grouped_gemm_swiglu_autograd);

}  // namespace transformer_plugin::gemm
