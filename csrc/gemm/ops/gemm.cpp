// gemm: a [M, K] times b, with its gradient, or into a buffer.

#include "common/ops/gemm.h"

#include "common/autograd.h"
#include "common/register.h"
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

constexpr const char* kOp = "gemm";
constexpr const char* kOutOp = "gemm_out";

// The arguments of both ops.
struct Arguments {
  const char* op;
  const Tensor &a, &b;
  const OptionalTensor& bias;
  bool transpose_b;
  const OptionalTensor& alpha;
  OptionalList a_scale, b_scale;
  std::string_view a_key, b_key;

  bool quantized() const { return is_quantized(a_key, b_key); }
  Argument a_argument() const { return {op, "a", a}; }
  at::ScalarType result_dtype(OptionalDtype dtype) const {
    return quantized() ? quantized_output_dtype(op, dtype) : output_dtype(a_argument(), dtype);
  }
  c10::SymInt columns_of(const GemmProblem& problem) const {
    return transpose_b ? problem.b.rows() : problem.b.columns();
  }

  void check_plain_operands() const {
    check_plain(op, a_scale, b_scale);
    const Argument b_argument{op, "b", b};
    check_operand(a_argument(), 2);
    check_pair(b_argument, a_argument(), 2);
    check_size(b_argument, transpose_b ? 1 : 0, a.sym_size(1), "the columns of 'a', summed over");
  }

  // Sets those of `problem`.
  void check_quantized_operands(GemmProblem& problem) const {
    const OperandNames a_names = names_of_a(op), b_names = names_of_b(op);
    problem.a = checked_operand(a_names, {a, a_scale, a_key}, 2, nullptr, false);
    check_same_device({op, "b", b}, a_argument());
    problem.b = checked_operand(b_names, {b, b_scale, b_key}, 2, nullptr, false);
    check_formats(a_names, problem.a, b_names, problem.b, transpose_b);
    check_value_size(b_names, problem.b, transpose_b ? 1 : 0, problem.a.columns(),
                     "the columns of 'a', summed over");
  }

  GemmProblem checked() const {
    GemmProblem problem{.direction = transpose_b ? GemmDirection::kFprop : GemmDirection::kDgrad,
                        .bias = bias,
                        .alpha = alpha};
    if (quantized()) {
      check_quantized_operands(problem);
    } else {
      check_plain_operands();
      problem.a.data = a;
      problem.b.data = b;
    }
    if (bias) check_bias({op, "bias", *bias}, a_argument(), std::nullopt, columns_of(problem));
    if (bias && quantized()) check_no_gradient({op, "bias", *bias}, kNoQuantizedGradient);
    if (alpha) check_factor({op, "alpha", *alpha}, a_argument(), 1);
    return problem;
  }
};

Tensor gemm_meta(const Tensor& a, const Tensor& b, const OptionalTensor& bias, bool transpose_b,
                 OptionalDtype dtype, const OptionalTensor& alpha, OptionalList a_scale, OptionalList b_scale,
                 std::string_view a_key, std::string_view b_key) {
  const Arguments args{kOp, a, b, bias, transpose_b, alpha, a_scale, b_scale, a_key, b_key};
  const GemmProblem problem = args.checked();
  return empty(a, {a.sym_size(0), args.columns_of(problem)}, args.result_dtype(dtype));
}

Tensor gemm(const Tensor& a, const Tensor& b, const OptionalTensor& bias, bool transpose_b,
            OptionalDtype dtype, const OptionalTensor& alpha, OptionalList a_scale, OptionalList b_scale,
            std::string_view a_key, std::string_view b_key) {
  const Arguments args{kOp, a, b, bias, transpose_b, alpha, a_scale, b_scale, a_key, b_key};
  const GemmProblem problem = args.checked();
  const at::ScalarType to = args.result_dtype(dtype);
  const BelowAutograd guard;
  return run_gemm(problem, to);
}

// beta excludes the flag `accumulate`, which means a beta of 1.
GemmProblem checked_out(const Arguments& args, const Tensor& out, const OptionalTensor& beta,
                        bool accumulate) {
  TP_CHECK_VALUE(!accumulate || !beta, kOutOp, "beta",
                 "none where 'accumulate' adds to what the buffer holds",
                 describe(*beta) << " and accumulate=True", "Pass one of them");
  GemmProblem problem = args.checked();
  const Argument a = args.a_argument();
  check_result({kOutOp, "out", out}, a, args.a.sym_size(0), args.columns_of(problem));
  if (beta) check_factor({kOutOp, "beta", *beta}, a, 1);
  problem.beta = beta;
  problem.accumulate = accumulate;
  if (args.quantized()) return problem;
  constexpr const char* advice = "What is written into a buffer has none: call gemm, or detach it";
  check_no_gradient(a, advice);
  check_no_gradient({kOutOp, "b", args.b}, advice);
  if (args.bias) check_no_gradient({kOutOp, "bias", *args.bias}, advice);
  return problem;
}

void gemm_out_meta(const Tensor& a, const Tensor& b, const Tensor& out, const OptionalTensor& bias,
                   bool transpose_b, const OptionalTensor& alpha, const OptionalTensor& beta,
                   OptionalList a_scale, OptionalList b_scale, std::string_view a_key, std::string_view b_key,
                   bool accumulate) {
  checked_out({kOutOp, a, b, bias, transpose_b, alpha, a_scale, b_scale, a_key, b_key}, out, beta,
              accumulate);
}

void gemm_out(const Tensor& a, const Tensor& b, const Tensor& out, const OptionalTensor& bias,
              bool transpose_b, const OptionalTensor& alpha, const OptionalTensor& beta, OptionalList a_scale,
              OptionalList b_scale, std::string_view a_key, std::string_view b_key, bool accumulate) {
  const Arguments args{kOutOp, a, b, bias, transpose_b, alpha, a_scale, b_scale, a_key, b_key};
  const GemmProblem problem = checked_out(args, out, beta, accumulate);
  check_apart(kOutOp, {{"out", out}},
              {{"a", a},
               {"b", b},
               {"bias", bias},
               {"a_scale[0]", problem.a.scale},
               {"b_scale[0]", problem.b.scale},
               {"a_scale[1]", problem.a.amax},
               {"b_scale[1]", problem.b.amax},
               {"alpha", alpha},
               {"beta", beta}});
  const BelowAutograd guard;
  run_gemm(problem, out.scalar_type(), out);
}

class GemmFunction : public DifferentiableTwice<GemmFunction> {
 public:
  static constexpr const char* kName = "gemm";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b, const OptionalTensor& bias,
                        bool transpose_b, OptionalDtype dtype, const OptionalTensor& alpha) {
    ctx->save_for_backward(
        {b.requires_grad() ? a : Tensor(), a.requires_grad() ? b : Tensor(), or_undefined(alpha)});
    ctx->saved_data["transpose_b"] = transpose_b;
    ctx->saved_data["has_bias"] = bias.has_value();
    const BelowAutograd guard;
    return call_gemm(a, b, bias, transpose_b, dtype, alpha);
  }

  // The autograd engine casts a gradient to the dtype of its leaf.
  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const bool transpose_b = ctx->saved_data["transpose_b"].toBool();
    const Tensor& grad = grads[0];
    const OptionalTensor alpha = as_optional(saved[2]);
    Tensor grad_a, grad_b, grad_bias;
    if (ctx->needs_input_grad(0)) {
      const auto [g, b] = same_dtype(grad, saved[1]);
      grad_a = call_gemm(g, b, std::nullopt, !transpose_b, saved[1].scalar_type(), alpha);
    }
    if (ctx->needs_input_grad(1)) {
      const auto [g, a] = same_dtype(grad, saved[0]);
      grad_b = transpose_b ? call_gemm(g.t(), a, std::nullopt, false, saved[0].scalar_type(), alpha)
                           : call_gemm(a.t(), g, std::nullopt, false, saved[0].scalar_type(), alpha);
    }
    const bool has_bias = ctx->saved_data["has_bias"].toBool();
    if (has_bias && ctx->needs_input_grad(2)) grad_bias = ops::bias_backward(grad);
    return {grad_a, grad_b, grad_bias, Tensor(), Tensor(), Tensor()};
  }
};

// Quantized operands have no gradient.
Tensor gemm_autograd(const Tensor& a, const Tensor& b, const OptionalTensor& bias, bool transpose_b,
                     OptionalDtype dtype, const OptionalTensor& alpha, OptionalList a_scale,
                     OptionalList b_scale, std::string_view a_key, std::string_view b_key) {
  if (alpha) check_no_gradient({kOp, "alpha", *alpha}, kConstantFactor);
  if (!is_quantized(a_key, b_key) && any_requires_grad(a, b, bias)) {
    check_plain(kOp, a_scale, b_scale);
    return GemmFunction::apply(a, b, bias, transpose_b, dtype, alpha);
  }
  const BelowAutograd guard;
  return call_gemm(a, b, bias, transpose_b, dtype, alpha, {a_scale, b_scale, a_key, b_key});
}

}  // namespace

TP_IMPL(gemm, gemm, gemm_meta, gemm_autograd);
TP_IMPL_NO_GRADIENT(gemm_out, gemm_out, gemm_out_meta);

}  // namespace transformer_plugin::gemm
