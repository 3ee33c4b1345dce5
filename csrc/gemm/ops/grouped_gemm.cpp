// grouped_gemm: the rows of each group times the group's matrix, with its gradient, into a new or a given buffer.
#include "gemm/dispatch/grouped_gemm.h"

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/register.h"
#include "common/row_index.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
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
  const Tensor &a, &b, &group_sizes;
  const OptionalTensor &bias, &bias_scale, &alpha, &rows;
  bool transpose_b;
  LaunchOptions options;

  Argument a_argument() const { return {op, "a", a}; }
  // The argument whose first dimension is the capacity: the buffer, or the index into it.
  Argument capacity_argument() const { return rows ? Argument{op, "rows", *rows} : a_argument(); }
  c10::SymInt capacity() const { return capacity_argument().tensor.sym_size(0); }
  c10::SymInt columns() const { return b.sym_size(transpose_b ? 1 : 2); }

  void check() const {
    const Argument b_argument{op, "b", b};
    check_grouped_operand(a_argument(), 2);
    check_pair(b_argument, a_argument(), 3);
    check_size(b_argument, transpose_b ? 2 : 1, a.sym_size(1), "the columns of 'a', summed over");
    if (rows) check_row_index({op, "rows", *rows}, a_argument());
    check_groups({op, "group_sizes", group_sizes}, a_argument(), b_argument);
    if (bias) check_bias({op, "bias", *bias}, a_argument(), b.sym_size(0), columns());
    if (bias_scale) check_bias_scale({op, "bias_scale", *bias_scale}, bias.has_value(), capacity_argument());
    if (alpha) check_factor({op, "alpha", *alpha}, a_argument(), b.sym_size(0));
    check_launch_options(op, options);
  }

  // On a CPU also checks the values of sizes and index.
  Tensor offsets() const {
    const Argument buffer = capacity_argument();
    const Tensor result = group_offsets({op, "group_sizes", group_sizes}, buffer, buffer.tensor.size(0));
    if (rows) check_row_entries({op, "rows", *rows}, a_argument(), result);
    return result;
  }
};

Tensor grouped_gemm_meta(const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                         const OptionalTensor& bias, const OptionalTensor& bias_scale, bool transpose_b,
                         OptionalDtype dtype, const OptionalTensor& alpha, const OptionalTensor& rows,
                         int64_t max_sms, int64_t expected_rows) {
  const LaunchOptions options{max_sms, expected_rows};
  const Arguments args{kOp, a, b, group_sizes, bias, bias_scale, alpha, rows, transpose_b, options};
  args.check();
  return empty(a, {args.capacity(), args.columns()}, output_dtype(args.a_argument(), dtype));
}

Tensor grouped_gemm(const Tensor& a, const Tensor& b, const Tensor& group_sizes, const OptionalTensor& bias,
                    const OptionalTensor& bias_scale, bool transpose_b, OptionalDtype dtype,
                    const OptionalTensor& alpha, const OptionalTensor& rows, int64_t max_sms,
                    int64_t expected_rows) {
  const LaunchOptions options{max_sms, expected_rows};
  const Arguments args{kOp, a, b, group_sizes, bias, bias_scale, alpha, rows, transpose_b, options};
  args.check();
  const at::ScalarType to = output_dtype(args.a_argument(), dtype);
  const BelowAutograd guard;
  const Tensor offsets = args.offsets();
  const GroupedGemm problem{a,           b,     offsets,      bias, bias_scale,
                            transpose_b, alpha, std::nullopt, rows, args.options};
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (a.is_cuda()) return grouped_gemm_cuda(problem, to);
#endif
  return run_grouped_gemm(problem, to);
}

void check_out(const Arguments& args, const Tensor& out, const OptionalTensor& beta) {
  args.check();
  check_result({kOutOp, "out", out}, args.a_argument(), args.capacity(), args.columns());
  if (beta) check_factor({kOutOp, "beta", *beta}, args.a_argument(), args.b.sym_size(0));
  constexpr const char* advice = "What is written into a buffer has none: call grouped_gemm, or detach it";
  check_no_gradient(args.a_argument(), advice);
  check_no_gradient({kOutOp, "b", args.b}, advice);
  if (args.bias) check_no_gradient({kOutOp, "bias", *args.bias}, advice);
  if (args.bias_scale) check_no_gradient({kOutOp, "bias_scale", *args.bias_scale}, advice);
}

void grouped_gemm_out_meta(const Tensor& a, const Tensor& b, const Tensor& group_sizes, const Tensor& out,
                           const OptionalTensor& bias, const OptionalTensor& bias_scale, bool transpose_b,
                           const OptionalTensor& alpha, const OptionalTensor& beta,
                           const OptionalTensor& rows, int64_t max_sms, int64_t expected_rows) {
  check_out({kOutOp, a, b, group_sizes, bias, bias_scale, alpha, rows, transpose_b, {max_sms, expected_rows}},
            out, beta);
}

void grouped_gemm_out(const Tensor& a, const Tensor& b, const Tensor& group_sizes, const Tensor& out,
                      const OptionalTensor& bias, const OptionalTensor& bias_scale, bool transpose_b,
                      const OptionalTensor& alpha, const OptionalTensor& beta, const OptionalTensor& rows,
                      int64_t max_sms, int64_t expected_rows) {
  const LaunchOptions options{max_sms, expected_rows};
  const Arguments args{kOutOp, a, b, group_sizes, bias, bias_scale, alpha, rows, transpose_b, options};
  check_out(args, out, beta);
  check_apart(kOutOp, {{"out", out}},
              {{"a", a},
               {"b", b},
               {"bias", bias},
               {"bias_scale", bias_scale},
               {"group_sizes", group_sizes},
               {"rows", rows},
               {"alpha", alpha},
               {"beta", beta}});
  const BelowAutograd guard;
  const Tensor offsets = args.offsets();
  run_grouped_gemm_out({a, b, offsets, bias, bias_scale, transpose_b, alpha, beta, rows, args.options}, out);
}

class GroupedGemmFunction : public DifferentiableTwice<GroupedGemmFunction> {
 public:
  static constexpr const char* kName = "grouped_gemm";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                        const OptionalTensor& bias, const OptionalTensor& bias_scale, bool transpose_b,
                        OptionalDtype dtype, const OptionalTensor& alpha, const OptionalTensor& rows,
                        int64_t max_sms, int64_t expected_rows) {
    ctx->save_for_backward({b.requires_grad() ? a : Tensor(), a.requires_grad() ? b : Tensor(), group_sizes,
                            wants_grad(bias_scale) ? *bias : Tensor(), or_undefined(bias_scale),
                            or_undefined(alpha), or_undefined(rows)});
    ctx->saved_data["transpose_b"] = transpose_b;
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["num_rows"] = a.sym_size(0);
    save_options(ctx, {max_sms, expected_rows});
    const BelowAutograd guard;
    return call_grouped_gemm(a, b, group_sizes, bias, bias_scale, transpose_b, dtype, alpha, rows,
                             {max_sms, expected_rows});
  }

  // A row that the index names several times gets the sum of their gradients.
  static Tensor gradient_of_a(AutogradContext* ctx, const Tensor& grad, const Tensor& matrices,
                              const Tensor& sizes, const OptionalTensor& alpha, const OptionalTensor& rows) {
    const auto [g, b] = same_dtype(grad, matrices);
    const bool transpose_b = ctx->saved_data["transpose_b"].toBool();
    const Tensor taken = call_grouped_gemm(g, b, sizes, std::nullopt, std::nullopt, !transpose_b,
                                           matrices.scalar_type(), alpha, std::nullopt, saved_options(ctx));
    return rows ? call_gather_rows_backward(taken, *rows, sizes, ctx->saved_data["num_rows"].toSymInt())
                : taken;
  }

  // The index belongs to the input, so if the input comes first, the transposed gradient is computed.
  static Tensor gradient_of_b(AutogradContext* ctx, const Tensor& grad, const Tensor& input,
                              const Tensor& sizes, const OptionalTensor& alpha, const OptionalTensor& rows) {
    const auto [g, a] = same_dtype(grad, input);
    const at::ScalarType dtype = input.scalar_type();
    const bool transpose_b = ctx->saved_data["transpose_b"].toBool();
    const LaunchOptions options = saved_options(ctx);
    if (!transpose_b && !rows) {
      return call_grouped_gemm_wgrad(a, g, sizes, dtype, alpha, std::nullopt, options);
    }
    const Tensor gradient = call_grouped_gemm_wgrad(g, a, sizes, dtype, alpha, rows, options);
    return transpose_b ? gradient : gradient.transpose(1, 2);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &grad = grads[0], &sizes = saved[2];
    const OptionalTensor alpha = as_optional(saved[5]), rows = as_optional(saved[6]);
    Tensor grad_a, grad_b;
    if (ctx->needs_input_grad(0)) grad_a = gradient_of_a(ctx, grad, saved[1], sizes, alpha, rows);
    if (ctx->needs_input_grad(1)) grad_b = gradient_of_b(ctx, grad, saved[0], sizes, alpha, rows);
    const bool has_bias = ctx->saved_data["has_bias"].toBool();
    const auto [grad_bias, grad_scale] = bias_gradients(ctx, has_bias, grad, sizes, saved[3], saved[4]);
    return {grad_a,   grad_b,   Tensor(), grad_bias, grad_scale, Tensor(),
            Tensor(), Tensor(), Tensor(), Tensor(),  Tensor()};
  }
};

Tensor grouped_gemm_autograd(const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                             const OptionalTensor& bias, const OptionalTensor& bias_scale, bool transpose_b,
                             OptionalDtype dtype, const OptionalTensor& alpha, const OptionalTensor& rows,
                             int64_t max_sms, int64_t expected_rows) {
  if (alpha) check_no_gradient({kOp, "alpha", *alpha}, kConstantFactor);
  if (any_wants_grad(a, b, bias, bias_scale)) {
    return GroupedGemmFunction::apply(a, b, group_sizes, bias, bias_scale, transpose_b, dtype, alpha, rows,
                                      max_sms, expected_rows);
  }
  const BelowAutograd guard;
  return grouped_gemm_op().call(a, b, group_sizes, bias, bias_scale, transpose_b, dtype, alpha, rows, max_sms,
                                expected_rows);
}

}  // namespace

TP_IMPL(kOp, grouped_gemm, grouped_gemm_meta, grouped_gemm_autograd);
TP_IMPL_NO_GRADIENT(kOutOp, grouped_gemm_out, grouped_gemm_out_meta);

}  // namespace transformer_plugin::gemm
