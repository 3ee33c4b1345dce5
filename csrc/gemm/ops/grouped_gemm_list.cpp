// grouped_gemm_list: grouped_gemm with a list of matrices, one for each group, at any addresses; with its gradient.

#include <algorithm>
#include <tuple>

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/register.h"
#include "common/row_index.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/grouped_gemm.h"
#include "gemm/ops/calls.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalDtype = std::optional<at::ScalarType>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "grouped_gemm_list";

struct Arguments {
  const Tensor& a;
  at::TensorList b;
  const Tensor& group_sizes;
  const OptionalTensor &bias, &bias_scale, &alpha, &rows;
  bool transpose_b;
  LaunchOptions options;

  Argument a_argument() const { return {kOp, "a", a}; }
  // The argument whose first dimension is the capacity: the buffer, or the index into it.
  Argument capacity_argument() const { return rows ? Argument{kOp, "rows", *rows} : a_argument(); }
  c10::SymInt capacity() const { return capacity_argument().tensor.sym_size(0); }
  c10::SymInt columns() const { return b[0].sym_size(transpose_b ? 0 : 1); }

  void check() const {
    check_grouped_operand(a_argument(), 2);
    check_list(kOp, "b", b);
    const Argument first{kOp, "b[0]", b[0]};
    const auto groups = static_cast<int64_t>(b.size());
    check_pair(first, a_argument(), 2);
    check_size(first, transpose_b ? 1 : 0, a.sym_size(1), "the columns of 'a', summed over");
    if (rows) check_row_index({kOp, "rows", *rows}, a_argument());
    check_group_sizes({kOp, "group_sizes", group_sizes}, a_argument());
    check_size({kOp, "group_sizes", group_sizes}, 0, groups, "the matrices of 'b'");
    if (bias) check_bias({kOp, "bias", *bias}, a_argument(), c10::SymInt(groups), columns());
    if (bias_scale) check_bias_scale({kOp, "bias_scale", *bias_scale}, bias.has_value(), capacity_argument());
    if (alpha) check_factor({kOp, "alpha", *alpha}, a_argument(), groups);
    check_launch_options(kOp, options);
  }

  // On a CPU also checks the values of sizes and index.
  Tensor offsets() const {
    const Argument buffer = capacity_argument();
    const Tensor result = group_offsets({kOp, "group_sizes", group_sizes}, buffer, buffer.tensor.size(0));
    if (rows) check_row_entries({kOp, "rows", *rows}, a_argument(), result);
    return result;
  }
};

Tensor grouped_gemm_list_meta(const Tensor& a, at::TensorList b, const Tensor& group_sizes,
                              const OptionalTensor& bias, const OptionalTensor& bias_scale, bool transpose_b,
                              OptionalDtype dtype, const OptionalTensor& alpha, const OptionalTensor& rows,
                              int64_t max_sms, int64_t expected_rows) {
  const LaunchOptions options{max_sms, expected_rows};
  const Arguments args{a, b, group_sizes, bias, bias_scale, alpha, rows, transpose_b, options};
  args.check();
  return empty(a, {args.capacity(), args.columns()}, output_dtype(args.a_argument(), dtype));
}

// Matrices that are members of a contiguous stack are passed as the stack.
Tensor grouped_gemm_list(const Tensor& a, at::TensorList b, const Tensor& group_sizes,
                         const OptionalTensor& bias, const OptionalTensor& bias_scale, bool transpose_b,
                         OptionalDtype dtype, const OptionalTensor& alpha, const OptionalTensor& rows,
                         int64_t max_sms, int64_t expected_rows) {
  const LaunchOptions options{max_sms, expected_rows};
  const Arguments args{a, b, group_sizes, bias, bias_scale, alpha, rows, transpose_b, options};
  args.check();
  const at::ScalarType to = output_dtype(args.a_argument(), dtype);
  const BelowAutograd guard;
  const Tensor offsets = args.offsets();
  const OptionalTensor stack = as_stack(b);
  const bool whole = stack && stack->is_contiguous();
  return run_grouped_gemm({a, whole ? *stack : b[0], offsets, bias, bias_scale, transpose_b, alpha,
                           std::nullopt, rows, options, nullptr, whole ? at::TensorList() : b},
                          to);
}

class GroupedGemmListFunction : public DifferentiableTwice<GroupedGemmListFunction> {
 public:
  static constexpr const char* kName = "grouped_gemm_list";
  static constexpr bool is_traceable = true;

  // Saves what every gradient needs, then the matrices.
  static Tensor forward(AutogradContext* ctx, const Tensor& a, at::TensorList b, const Tensor& group_sizes,
                        const OptionalTensor& bias, const OptionalTensor& bias_scale, bool transpose_b,
                        OptionalDtype dtype, const OptionalTensor& alpha, const OptionalTensor& rows,
                        int64_t max_sms, int64_t expected_rows) {
    variable_list saved{
        wants_grad(b) ? a : Tensor(), group_sizes,         wants_grad(bias_scale) ? *bias : Tensor(),
        or_undefined(bias_scale),     or_undefined(alpha), or_undefined(rows)};
    if (a.requires_grad()) saved.insert(saved.end(), b.begin(), b.end());
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["groups"] = static_cast<int64_t>(b.size());
    ctx->saved_data["transpose_b"] = transpose_b;
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["num_rows"] = a.sym_size(0);
    save_options(ctx, {max_sms, expected_rows});
    const BelowAutograd guard;
    return call_grouped_gemm_list(a, b, group_sizes, bias, bias_scale, transpose_b, dtype, alpha, rows,
                                  {max_sms, expected_rows});
  }

  // A row that the index names several times gets the sum of their gradients.
  static Tensor gradient_of_a(AutogradContext* ctx, const Tensor& grad, variable_list matrices,
                              const Tensor& sizes, const OptionalTensor& alpha, const OptionalTensor& rows) {
    const at::ScalarType dtype = matrices[0].scalar_type();
    const at::ScalarType common = grad.scalar_type() == dtype ? dtype : sum_dtype(dtype);
    for (Tensor& matrix : matrices) matrix = matrix.to(common);
    const bool transpose_b = ctx->saved_data["transpose_b"].toBool();
    const Tensor taken = call_grouped_gemm_list(grad.to(common), matrices, sizes, std::nullopt, std::nullopt,
                                                !transpose_b, dtype, alpha, std::nullopt, saved_options(ctx));
    return rows ? call_gather_rows_backward(taken, *rows, sizes, ctx->saved_data["num_rows"].toSymInt())
                : taken;
  }

  // Views of one tensor. The index belongs to the input, so if the input comes first, the transposed gradient is computed.
  static variable_list gradients_of_b(AutogradContext* ctx, const Tensor& grad, const Tensor& input,
                                      const Tensor& sizes, const OptionalTensor& alpha,
                                      const OptionalTensor& rows) {
    const auto [g, a] = same_dtype(grad, input);
    const at::ScalarType dtype = input.scalar_type();
    const bool transpose_b = ctx->saved_data["transpose_b"].toBool();
    const LaunchOptions options = saved_options(ctx);
    if (!transpose_b && !rows) {
      return call_grouped_gemm_wgrad(a, g, sizes, dtype, alpha, std::nullopt, options).unbind();
    }
    const Tensor gradient = call_grouped_gemm_wgrad(g, a, sizes, dtype, alpha, rows, options);
    return (transpose_b ? gradient : gradient.transpose(1, 2)).unbind();
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto groups = static_cast<size_t>(ctx->saved_data["groups"].toInt());
    const Tensor &grad = grads[0], &sizes = saved[1];
    const OptionalTensor alpha = as_optional(saved[4]), rows = as_optional(saved[5]);
    variable_list result(groups + 10);  // one for each argument, and each matrix of `b`
    if (ctx->needs_input_grad(0)) {
      result[0] = gradient_of_a(ctx, grad, {saved.begin() + 6, saved.end()}, sizes, alpha, rows);
    }
    if (saved[0].defined()) {
      const variable_list own = gradients_of_b(ctx, grad, saved[0], sizes, alpha, rows);
      for (size_t g = 0; g < groups; ++g) {
        if (ctx->needs_input_grad(1 + g)) result[1 + g] = own[g];
      }
    }
    const bool has_bias = ctx->saved_data["has_bias"].toBool();
    std::tie(result[groups + 2], result[groups + 3]) =
        bias_gradients(ctx, has_bias, grad, sizes, saved[2], saved[3], groups + 2);
    return result;
  }
};

Tensor grouped_gemm_list_autograd(const Tensor& a, at::TensorList b, const Tensor& group_sizes,
                                  const OptionalTensor& bias, const OptionalTensor& bias_scale,
                                  bool transpose_b, OptionalDtype dtype, const OptionalTensor& alpha,
                                  const OptionalTensor& rows, int64_t max_sms, int64_t expected_rows) {
  if (alpha) check_no_gradient({kOp, "alpha", *alpha}, kConstantFactor);
  if (any_wants_grad(a, b, bias, bias_scale)) {
    return GroupedGemmListFunction::apply(a, b, group_sizes, bias, bias_scale, transpose_b, dtype, alpha,
                                          rows, max_sms, expected_rows);
  }
  const BelowAutograd guard;
  return call_grouped_gemm_list(a, b, group_sizes, bias, bias_scale, transpose_b, dtype, alpha, rows,
                                {max_sms, expected_rows});
}

}  // namespace

TP_IMPL(kOp, grouped_gemm_list, grouped_gemm_list_meta, grouped_gemm_list_autograd);

}  // namespace transformer_plugin::gemm
