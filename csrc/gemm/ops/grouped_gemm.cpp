// grouped_gemm: the rows of each group times the group's matrix, with its gradient, or into a buffer.
#include <tuple>

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/ops/gemm.h"
#include "common/register.h"
#include "common/row_index.h"
#include "common/shared_offsets.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/quantized_operands.h"
#include "gemm/dispatch/run_gemm.h"
#include "gemm/ops/calls.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalDtype = std::optional<at::ScalarType>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "grouped_gemm";
constexpr const char* kOutOp = "grouped_gemm_out";

// The arguments of both ops.
struct Arguments {
  const char* op;
  const Tensor& a;
  at::TensorList b;
  const Tensor& group_sizes;
  const OptionalTensor &bias, &bias_scale, &alpha, &rows;
  bool transpose_b;
  LaunchOptions options;
  OptionalList a_scale, b_scale;
  std::string_view a_key, b_key;
  bool zero_tail = true;

  bool quantized() const { return is_quantized(a_key, b_key); }
  Argument a_argument() const { return {op, "a", a}; }
  Argument sizes_argument() const { return {op, "group_sizes", group_sizes}; }
  // The argument whose first dimension is the capacity: the buffer, or the index into it.
  Argument capacity_argument() const { return rows ? Argument{op, "rows", *rows} : a_argument(); }
  c10::SymInt capacity() const { return capacity_argument().tensor.sym_size(0); }
  // Of the first matrix.
  c10::SymInt columns_of(const Quantized& matrix) const {
    return transpose_b ? matrix.rows() : matrix.columns();
  }
  // Dimension K of the matrices.
  int64_t summed_dim() const { return (transpose_b ? 1 : 0) + (is_stack(b) ? 1 : 0); }
  at::ScalarType result_dtype(OptionalDtype dtype) const {
    return quantized() ? quantized_output_dtype(op, dtype) : output_dtype(a_argument(), dtype);
  }

  void check_plain_operands() const {
    check_plain(op, a_scale, b_scale);
    const bool stack = is_stack(b);
    check_grouped_operand(a_argument(), 2);
    if (!stack) check_list(op, "b", b);
    const Argument b_argument{op, stack ? "b" : "b[0]", b[0]};
    check_pair(b_argument, a_argument(), stack ? 3 : 2);
    check_size(b_argument, summed_dim(), a.sym_size(1), "the columns of 'a', summed over");
    if (rows) check_row_index({op, "rows", *rows}, a_argument());
    check_groups(sizes_argument(), a_argument(), "b", group_count(b));
  }

  // Sets those of `problem`.
  void check_quantized_operands(GemmProblem& problem) const {
    const bool stack = is_stack(b);
    const OperandNames a_names = names_of_a(op);
    OperandNames b_names = names_of_b(op);
    if (!stack) b_names.data = "b[0]";
    check_dim(a_argument(), 2);
    stack ? check_dim({op, "b", b[0]}, 3) : check_list(op, "b", b);
    check_groups(sizes_argument(), a_argument(), "b", group_count(b));
    problem.a = checked_operand(a_names, {a, a_scale, a_key}, 2, &group_sizes, false);
    check_same_device({op, b_names.data, b[0]}, a_argument());
    problem.b = stack ? checked_operand(b_names, {b[0], b_scale, b_key}, 3, nullptr, false)
                      : checked_list(b_names, b, list_or_none(b_scale), b_key);
    problem.list_scales = stack ? at::TensorList() : list_or_none(b_scale);
    problem.group_sizes = group_sizes;
    check_formats(a_names, problem.a, b_names, problem.b, transpose_b);
    check_value_size(b_names, problem.b, summed_dim(), problem.a.columns(),
                     "the columns of 'a', summed over");
    TP_CHECK_VALUE(!rows, op, "rows", "None with quantized operands", describe(*rows),
                   "Take the rows before they are quantized");
  }

  // The problem, without offsets.
  GemmProblem checked() const {
    GemmProblem problem{.direction = transpose_b ? GemmDirection::kFprop : GemmDirection::kDgrad,
                        .bias = bias,
                        .bias_scale = bias_scale,
                        .alpha = alpha,
                        .zero_tail = zero_tail,
                        .options = options,
                        .list = is_stack(b) ? at::TensorList() : b};
    if (quantized()) {
      check_quantized_operands(problem);
    } else {
      check_plain_operands();
      problem.a.data = a;
      problem.b.data = b[0];
      if (rows) problem.a.row_index = *rows;
    }
    if (bias) check_bias({op, "bias", *bias}, a_argument(), group_count(b), columns_of(problem.b));
    if (bias_scale) check_bias_scale({op, "bias_scale", *bias_scale}, bias.has_value(), capacity_argument());
    if (quantized()) check_no_gradient_of_bias(kNoQuantizedGradient);
    if (alpha) check_factor({op, "alpha", *alpha}, a_argument(), group_count(b));
    check_launch_options(op, options);
    return problem;
  }

  void check_no_gradient_of_bias(const char* advice) const {
    if (bias) check_no_gradient({op, "bias", *bias}, advice);
    if (bias_scale) check_no_gradient({op, "bias_scale", *bias_scale}, advice);
  }

  // Adds the offsets; on a CPU also checks the values of sizes and index. Matrices that are members of a
  // contiguous stack are passed as the stack.
  void complete(GemmProblem& problem) const {
    const Argument buffer = capacity_argument();
    problem.offsets = group_offsets(sizes_argument(), buffer, buffer.tensor.size(0));
    if (rows) check_row_entries({op, "rows", *rows}, a_argument(), problem.offsets);
    if (problem.list.empty() || quantized()) return;
    if (OptionalTensor stack = as_contiguous_stack(problem.list)) {
      problem.b.data = *std::move(stack);
      problem.list = {};
    }
  }
};

Tensor grouped_gemm_meta(const Tensor& a, at::TensorList b, const Tensor& group_sizes,
                         const OptionalTensor& bias, const OptionalTensor& bias_scale, bool transpose_b,
                         OptionalDtype dtype, const OptionalTensor& alpha, const OptionalTensor& rows,
                         int64_t max_sms, int64_t expected_rows, OptionalList a_scale, OptionalList b_scale,
                         std::string_view a_key, std::string_view b_key, bool) {
  const Arguments args{kOp,        a,       b,     group_sizes, bias,
                       bias_scale, alpha,   rows,  transpose_b, {max_sms, expected_rows},
                       a_scale,    b_scale, a_key, b_key};
  const GemmProblem problem = args.checked();
  return empty(a, {args.capacity(), args.columns_of(problem.b)}, args.result_dtype(dtype));
}

Tensor grouped_gemm(const Tensor& a, at::TensorList b, const Tensor& group_sizes, const OptionalTensor& bias,
                    const OptionalTensor& bias_scale, bool transpose_b, OptionalDtype dtype,
                    const OptionalTensor& alpha, const OptionalTensor& rows, int64_t max_sms,
                    int64_t expected_rows, OptionalList a_scale, OptionalList b_scale, std::string_view a_key,
                    std::string_view b_key, bool zero_tail) {
  const Arguments args{kOp,        a,       b,     group_sizes, bias,
                       bias_scale, alpha,   rows,  transpose_b, {max_sms, expected_rows},
                       a_scale,    b_scale, a_key, b_key,       zero_tail};
  GemmProblem problem = args.checked();
  const at::ScalarType to = args.result_dtype(dtype);
  const BelowAutograd guard;
  args.complete(problem);
  return run_gemm(problem, to);
}

GemmProblem checked_out(const Arguments& args, const Tensor& out, const OptionalTensor& beta) {
  GemmProblem problem = args.checked();
  check_result({kOutOp, "out", out}, args.a_argument(), args.capacity(), args.columns_of(problem.b));
  if (beta) check_factor({kOutOp, "beta", *beta}, args.a_argument(), group_count(args.b));
  problem.beta = beta;
  if (args.quantized()) return problem;
  constexpr const char* advice = "What is written into a buffer has none: call grouped_gemm, or detach it";
  check_no_gradient(args.a_argument(), advice);
  check_no_gradients(kOutOp, "b", args.b, advice);
  args.check_no_gradient_of_bias(advice);
  return problem;
}

void grouped_gemm_out_meta(const Tensor& a, at::TensorList b, const Tensor& group_sizes, const Tensor& out,
                           const OptionalTensor& bias, const OptionalTensor& bias_scale, bool transpose_b,
                           const OptionalTensor& alpha, const OptionalTensor& beta,
                           const OptionalTensor& rows, int64_t max_sms, int64_t expected_rows,
                           OptionalList a_scale, OptionalList b_scale, std::string_view a_key,
                           std::string_view b_key) {
  const Arguments args{kOutOp,     a,       b,     group_sizes, bias,
                       bias_scale, alpha,   rows,  transpose_b, {max_sms, expected_rows},
                       a_scale,    b_scale, a_key, b_key};
  checked_out(args, out, beta);
}

void grouped_gemm_out(const Tensor& a, at::TensorList b, const Tensor& group_sizes, const Tensor& out,
                      const OptionalTensor& bias, const OptionalTensor& bias_scale, bool transpose_b,
                      const OptionalTensor& alpha, const OptionalTensor& beta, const OptionalTensor& rows,
                      int64_t max_sms, int64_t expected_rows, OptionalList a_scale, OptionalList b_scale,
                      std::string_view a_key, std::string_view b_key) {
  const Arguments args{kOutOp,     a,       b,     group_sizes, bias,
                       bias_scale, alpha,   rows,  transpose_b, {max_sms, expected_rows},
                       a_scale,    b_scale, a_key, b_key};
  GemmProblem problem = checked_out(args, out, beta);
  check_apart(kOutOp, {{"out", out}},
              {{"a", a},
               {"bias", bias},
               {"bias_scale", bias_scale},
               {"group_sizes", group_sizes},
               {"rows", rows},
               {"alpha", alpha},
               {"beta", beta}});
  check_apart_from_list(kOutOp, out, "b", b);
  check_apart_from_list(kOutOp, out, "a_scale", list_or_none(a_scale));
  check_apart_from_list(kOutOp, out, "b_scale", list_or_none(b_scale));
  const BelowAutograd guard;
  args.complete(problem);
  run_gemm(problem, out.scalar_type(), out);
}

// The node of a stack, one tensor, and of a list, one tensor for each group.
class GroupedGemmFunction : public DifferentiableTwice<GroupedGemmFunction> {
 public:
  static constexpr const char* kName = "grouped_gemm";
  static constexpr bool is_traceable = true;

  // Saves what every gradient needs, then the matrices.
  static Tensor forward(AutogradContext* ctx, const Tensor& a, at::TensorList b, const Tensor& group_sizes,
                        const OptionalTensor& bias, const OptionalTensor& bias_scale, bool transpose_b,
                        OptionalDtype dtype, const OptionalTensor& alpha, const OptionalTensor& rows,
                        int64_t max_sms, int64_t expected_rows, bool zero_tail) {
    variable_list saved{
        requires_grad(b) ? a : Tensor(), group_sizes,         requires_grad(bias_scale) ? *bias : Tensor(),
        or_undefined(bias_scale),        or_undefined(alpha), or_undefined(rows)};
    if (a.requires_grad()) saved.insert(saved.end(), b.begin(), b.end());
    ctx->save_for_backward(std::move(saved));
    // Only what is not the common case, as each entry costs host time.
    if (!is_stack(b)) ctx->saved_data["matrices"] = static_cast<int64_t>(b.size());
    if (!transpose_b) ctx->saved_data["not_transposed"] = true;
    if (bias) ctx->saved_data["has_bias"] = true;
    if (rows) ctx->saved_data["num_rows"] = a.sym_size(0);
    save_options(ctx, {max_sms, expected_rows});
    const BelowAutograd guard;
    return ops::grouped_gemm(a, b, group_sizes, bias, bias_scale, transpose_b, dtype, alpha, rows, max_sms,
                             expected_rows, std::nullopt, std::nullopt, "none", "none", zero_tail);
  }

  static bool has_entry(const AutogradContext* ctx, const char* name) {
    return ctx->saved_data.find(name) != ctx->saved_data.end();
  }

  // A row that the index names several times gets the sum of their gradients.
  static Tensor gradient_of_a(AutogradContext* ctx, const Tensor& grad, variable_list matrices,
                              const Tensor& sizes, const OptionalTensor& alpha, const OptionalTensor& rows) {
    const at::ScalarType dtype = matrices[0].scalar_type();
    const at::ScalarType common = grad.scalar_type() == dtype ? dtype : sum_dtype(dtype);
    if (common != dtype) {
      for (Tensor& matrix : matrices) matrix = matrix.to(common);
    }
    const bool transpose_b = !has_entry(ctx, "not_transposed");
    const LaunchOptions options = saved_options(ctx);
    const Tensor taken =
        ops::grouped_gemm(grad.to(common), matrices, sizes, std::nullopt, std::nullopt, !transpose_b, dtype,
                          alpha, std::nullopt, options.max_sms, options.expected_rows, std::nullopt,
                          std::nullopt, "none", "none", /*zero_tail=*/true);
    return rows ? ops::gather_rows_backward(taken, *rows, sizes, ctx->saved_data["num_rows"].toSymInt())
                : taken;
  }

  static Tensor gradient_of_b(AutogradContext* ctx, const Tensor& grad, const Tensor& input,
                              const Tensor& sizes, const OptionalTensor& alpha, const OptionalTensor& rows) {
    const auto [g, a] = same_dtype(grad, input);
    const at::ScalarType dtype = input.scalar_type();
    const bool transpose_b = !has_entry(ctx, "not_transposed");
    const LaunchOptions options = saved_options(ctx);
    return call_grouped_gemm_wgrad(transpose_b ? GroupedWgradCall{.grad = g,
                                                                  .input = a,
                                                                  .group_sizes = sizes,
                                                                  .input_rows = rows,
                                                                  .options = options}
                                               : GroupedWgradCall{.grad = a,
                                                                  .input = g,
                                                                  .group_sizes = sizes,
                                                                  .grad_rows = rows,
                                                                  .options = options},
                                   dtype, alpha);
  }

  // The gradients of a list are views of one tensor.
  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const bool of_stack = !has_entry(ctx, "matrices");
    const size_t matrices = of_stack ? 1 : static_cast<size_t>(ctx->saved_data["matrices"].toInt());
    const Tensor &grad = grads[0], &sizes = saved[1];
    const SharedOffsets shared(sizes);
    const OptionalTensor alpha = as_optional(saved[4]), rows = as_optional(saved[5]);
    variable_list result(matrices + 11);  // one for each argument, and each matrix of `b`
    if (ctx->needs_input_grad(0)) {
      result[0] = gradient_of_a(ctx, grad, {saved.begin() + 6, saved.end()}, sizes, alpha, rows);
    }
    bool needs_b_grad = false;
    for (size_t g = 0; g < matrices && !needs_b_grad; ++g) needs_b_grad = ctx->needs_input_grad(1 + g);
    if (needs_b_grad) {
      const Tensor stack = gradient_of_b(ctx, grad, saved[0], sizes, alpha, rows);
      if (of_stack) {
        result[1] = stack;
      } else {
        const variable_list each = stack.unbind();
        for (size_t g = 0; g < matrices; ++g) {
          if (ctx->needs_input_grad(1 + g)) result[1 + g] = each[g];
        }
      }
    }
    const bool has_bias = has_entry(ctx, "has_bias");
    std::tie(result[matrices + 2], result[matrices + 3]) =
        bias_gradients(ctx, has_bias, grad, sizes, saved[2], saved[3], matrices + 2);
    return result;
  }
};

// Quantized operands have no gradient.
Tensor grouped_gemm_autograd(const Tensor& a, at::TensorList b, const Tensor& group_sizes,
                             const OptionalTensor& bias, const OptionalTensor& bias_scale, bool transpose_b,
                             OptionalDtype dtype, const OptionalTensor& alpha, const OptionalTensor& rows,
                             int64_t max_sms, int64_t expected_rows, OptionalList a_scale,
                             OptionalList b_scale, std::string_view a_key, std::string_view b_key,
                             bool zero_tail) {
  if (alpha) check_no_gradient({kOp, "alpha", *alpha}, kConstantFactor);
  if (!is_quantized(a_key, b_key) && any_requires_grad(a, b, bias, bias_scale)) {
    check_plain(kOp, a_scale, b_scale);
    return GroupedGemmFunction::apply(a, b, group_sizes, bias, bias_scale, transpose_b, dtype, alpha, rows,
                                      max_sms, expected_rows, zero_tail);
  }
  const BelowAutograd guard;
  return ops::grouped_gemm(a, b, group_sizes, bias, bias_scale, transpose_b, dtype, alpha, rows, max_sms,
                           expected_rows, a_scale, b_scale, a_key, b_key, zero_tail);
}

}  // namespace

TP_IMPL(grouped_gemm, grouped_gemm, grouped_gemm_meta, grouped_gemm_autograd);
TP_IMPL_NO_GRADIENT(grouped_gemm_out, grouped_gemm_out, grouped_gemm_out_meta);

}  // namespace transformer_plugin::gemm
