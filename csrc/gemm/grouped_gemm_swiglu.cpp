// grouped_gemm_swiglu: the rows of each group times the group's own matrix, then SwiGLU times a probability, with its gradient.
#include <ATen/ops/arange.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/tensor.h"
#include "gemm/calls.h"
#include "gemm/checks.h"
#include "gemm/swiglu_product.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "grouped_gemm_swiglu";

void check(const Tensor& a, const Tensor& b, const Tensor& group_sizes, const OptionalTensor& probs,
           const OptionalTensor& bias, int64_t interleave, const LaunchOptions& options) {
  const Argument a_argument{kOp, "a", a}, b_argument{kOp, "b", b};
  check_dtype(a_argument, kFloatTypes);
  check_dim(a_argument, 2);
  check_pair(b_argument, a_argument, 3);
  check_size(b_argument, 2, a.sym_size(1), "the columns of 'a', summed over");
  TP_CHECK_VALUE(b.sym_size(1) % 2 == 0, kOp, "b",
                 "an even number of rows in each matrix (gate and linear part)", describe(b),
                 "Concatenate the weights of both");
  check_interleave(kOp, interleave);
  check_interleaved_columns(b_argument, b.sym_size(1) / 2, interleave);
  check_groups({kOp, "group_sizes", group_sizes}, a_argument, b_argument);
  if (probs) check_probs({kOp, "probs", *probs}, a_argument);
  if (bias) check_bias({kOp, "bias", *bias}, a_argument, b.sym_size(0), b.sym_size(1));
  check_launch_options(kOp, options);
}

TwoTensors grouped_gemm_swiglu_meta(const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                                    const OptionalTensor& probs, const OptionalTensor& bias,
                                    int64_t interleave, bool keep_input, int64_t max_sms,
                                    int64_t expected_rows) {
  check(a, b, group_sizes, probs, bias, interleave, {max_sms, expected_rows});
  const c10::SymInt rows = a.sym_size(0), columns = b.sym_size(1);
  return {empty(a, {rows, columns / 2}, a.scalar_type()),
          empty(a, {keep_input ? rows : c10::SymInt(0), columns}, a.scalar_type())};
}

TwoTensors grouped_gemm_swiglu(const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                               const OptionalTensor& probs, const OptionalTensor& bias, int64_t interleave,
                               bool keep_input, int64_t max_sms, int64_t expected_rows) {
  const LaunchOptions options{max_sms, expected_rows};
  check(a, b, group_sizes, probs, bias, interleave, options);
  const BelowAutograd guard;
  const Tensor offsets = group_offsets({kOp, "group_sizes", group_sizes}, {kOp, "a", a}, a.size(0));
  return swiglu_product({a, b, offsets, probs, bias, interleave, keep_input, options});
}

class GroupedGemmSwigluFunction : public torch::autograd::Function<GroupedGemmSwigluFunction> {
 public:
  static constexpr bool is_traceable = true;

  // Where h is not kept, the backward makes it again.
  static variable_list forward(AutogradContext* ctx, const Tensor& a, const Tensor& b,
                               const Tensor& group_sizes, const OptionalTensor& probs,
                               const OptionalTensor& bias, int64_t interleave, bool keep_input,
                               int64_t max_sms, int64_t expected_rows) {
    const bool wants_a = a.requires_grad(), wants_b = b.requires_grad();
    ctx->saved_data["has_probs"] = probs.has_value();
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["interleave"] = interleave;
    ctx->saved_data["max_sms"] = max_sms;
    ctx->saved_data["expected_rows"] = expected_rows;
    const BelowAutograd guard;
    const auto [act, h] = call_grouped_gemm_swiglu(a, b, group_sizes, probs, bias, interleave, keep_input,
                                                   {max_sms, expected_rows});
    ctx->mark_non_differentiable({h});
    ctx->save_for_backward({wants_b || !keep_input ? a : Tensor(), wants_a || !keep_input ? b : Tensor(),
                            group_sizes, keep_input ? h : Tensor(), or_undefined(probs),
                            keep_input ? Tensor() : or_undefined(bias)});
    return {act, h};
  }

  // Of rows before the tail only.
  static Tensor before_tail(const Tensor& rows, const Tensor& group_sizes) {
    const Tensor end = group_sizes.clamp_min(0).sum();
    const Tensor index = at::arange(c10::Scalar(rows.sym_size(0)), end.options());
    return at::where(index.lt(end), rows, 0.0);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &a = saved[0], &b = saved[1], &sizes = saved[2];
    const OptionalTensor probs = as_optional(saved[4]);
    const int64_t interleave = ctx->saved_data["interleave"].toInt();
    const LaunchOptions options{ctx->saved_data["max_sms"].toInt(), ctx->saved_data["expected_rows"].toInt()};
    const bool has_bias = ctx->saved_data["has_bias"].toBool();
    const Tensor h = saved[3].defined()
                         ? saved[3]
                         : call_grouped_gemm(a, b, sizes, as_optional(saved[5]), std::nullopt, true,
                                             std::nullopt, std::nullopt, std::nullopt, options);
    using Signature = TwoTensors(const Tensor&, const Tensor&, const OptionalTensor&);
    static const auto swiglu_backward = find_op<Signature>("swiglu_backward");
    const auto [grad_halves, grad_probs] = swiglu_backward.call(grads[0], halves_apart(h, interleave), probs);
    const Tensor grad_h = halves_in_turn(grad_halves, interleave);
    variable_list result(9);
    if (ctx->needs_input_grad(0)) {
      result[0] = call_grouped_gemm(grad_h, b, sizes, std::nullopt, std::nullopt, false, std::nullopt,
                                    std::nullopt, std::nullopt, options);
    }
    if (ctx->needs_input_grad(1)) {
      result[1] =
          call_grouped_gemm_wgrad(grad_h, a, sizes, std::nullopt, std::nullopt, std::nullopt, options);
    }
    // Tensors that are not given are not counted.
    if (probs && ctx->needs_input_grad(3)) result[3] = before_tail(grad_probs, sizes);
    if (has_bias && ctx->needs_input_grad(probs ? 4 : 3)) {
      result[4] = std::get<0>(call_grouped_bias_backward(grad_h, sizes, std::nullopt, std::nullopt));
    }
    return result;
  }
};

TwoTensors grouped_gemm_swiglu_autograd(const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                                        const OptionalTensor& probs, const OptionalTensor& bias,
                                        int64_t interleave, bool keep_input, int64_t max_sms,
                                        int64_t expected_rows) {
  if (any_wants_grad(a, b, probs, bias)) {
    const variable_list made = GroupedGemmSwigluFunction::apply(a, b, group_sizes, probs, bias, interleave,
                                                                keep_input, max_sms, expected_rows);
    return {made[0], made[1]};
  }
  const BelowAutograd guard;
  return call_grouped_gemm_swiglu(a, b, group_sizes, probs, bias, interleave, keep_input,
                                  {max_sms, expected_rows});
}

}  // namespace

TORCH_LIBRARY_IMPL(transformer_plugin, CPU, m) { m.impl(kOp, grouped_gemm_swiglu); }
TORCH_LIBRARY_IMPL(transformer_plugin, Meta, m) { m.impl(kOp, grouped_gemm_swiglu_meta); }
TORCH_LIBRARY_IMPL(transformer_plugin, Autograd, m) { m.impl(kOp, grouped_gemm_swiglu_autograd); }
#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin, CUDA, m) { m.impl(kOp, grouped_gemm_swiglu); }
#endif

}  // namespace transformer_plugin::gemm
