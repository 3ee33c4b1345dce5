// gemm: a [M, K] times b, with its gradient, or into a buffer. Quantized operands: dense_quantized.cpp.

#include "common/ops/gemm.h"

#include "common/autograd.h"
#include "common/register.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/generic/dense_gemm.h"
#include "gemm/ops/calls.h"
#include "gemm/ops/dense_quantized.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalDtype = std::optional<at::ScalarType>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "gemm";
constexpr const char* kOutOp = "gemm_out";

void check_gemm(const char* op, const Tensor& a, const Tensor& b, const OptionalTensor& bias,
                bool transpose_b, const OptionalTensor& alpha) {
  const Argument a_argument{op, "a", a};
  const Argument b_argument{op, "b", b};
  check_operand(a_argument, 2);
  check_pair(b_argument, a_argument, 2);
  check_size(b_argument, transpose_b ? 1 : 0, a.sym_size(1), "the columns of 'a', summed over");
  if (bias) check_bias({op, "bias", *bias}, a_argument, std::nullopt, b.sym_size(transpose_b ? 0 : 1));
  if (alpha) check_factor({op, "alpha", *alpha}, a_argument, 1);
}

Tensor gemm_meta(const Tensor& a, const Tensor& b, const OptionalTensor& bias, bool transpose_b,
                 OptionalDtype dtype, const OptionalTensor& alpha, OptionalList a_scale, OptionalList b_scale,
                 std::string_view a_key, std::string_view b_key) {
  if (is_quantized(a_key, b_key)) {
    return quantized_product_meta({kOp, {a, a_scale, a_key}, {b, b_scale, b_key}, bias, alpha, transpose_b},
                                  dtype);
  }
  check_plain(kOp, a_scale, b_scale);
  check_gemm(kOp, a, b, bias, transpose_b, alpha);
  return empty(a, {a.sym_size(0), b.sym_size(transpose_b ? 0 : 1)}, output_dtype({kOp, "a", a}, dtype));
}

Tensor gemm(const Tensor& a, const Tensor& b, const OptionalTensor& bias, bool transpose_b,
            OptionalDtype dtype, const OptionalTensor& alpha, OptionalList a_scale, OptionalList b_scale,
            std::string_view a_key, std::string_view b_key) {
  if (is_quantized(a_key, b_key)) {
    return quantized_product({kOp, {a, a_scale, a_key}, {b, b_scale, b_key}, bias, alpha, transpose_b},
                             dtype);
  }
  check_plain(kOp, a_scale, b_scale);
  check_gemm(kOp, a, b, bias, transpose_b, alpha);
  const at::ScalarType to = output_dtype({kOp, "a", a}, dtype);
  const BelowAutograd guard;
  return dense_gemm(a, transpose_b ? transposed_view(b) : b, bias, to, alpha);
}

// beta excludes the flag `accumulate`, which means a beta of 1.
void check_accumulate(const OptionalTensor& beta, bool accumulate) {
  TP_CHECK_VALUE(!accumulate || !beta, kOutOp, "beta",
                 "none where 'accumulate' adds to what the buffer holds",
                 describe(*beta) << " and accumulate=True", "Pass one of them");
}

void check_gemm_out(const Tensor& a, const Tensor& b, const Tensor& out, const OptionalTensor& bias,
                    bool transpose_b, const OptionalTensor& alpha, const OptionalTensor& beta,
                    bool accumulate) {
  check_accumulate(beta, accumulate);
  check_gemm(kOutOp, a, b, bias, transpose_b, alpha);
  const Argument a_argument{kOutOp, "a", a};
  check_result({kOutOp, "out", out}, a_argument, a.sym_size(0), b.sym_size(transpose_b ? 0 : 1));
  if (beta) check_factor({kOutOp, "beta", *beta}, a_argument, 1);
  constexpr const char* advice = "What is written into a buffer has none: call gemm, or detach it";
  check_no_gradient(a_argument, advice);
  check_no_gradient({kOutOp, "b", b}, advice);
  if (bias) check_no_gradient({kOutOp, "bias", *bias}, advice);
}

void gemm_out_meta(const Tensor& a, const Tensor& b, const Tensor& out, const OptionalTensor& bias,
                   bool transpose_b, const OptionalTensor& alpha, const OptionalTensor& beta,
                   OptionalList a_scale, OptionalList b_scale, std::string_view a_key, std::string_view b_key,
                   bool accumulate) {
  if (is_quantized(a_key, b_key)) {
    check_accumulate(beta, accumulate);
    return quantized_product_out_meta(
        {kOutOp, {a, a_scale, a_key}, {b, b_scale, b_key}, bias, alpha, transpose_b}, beta, out);
  }
  check_plain(kOutOp, a_scale, b_scale);
  check_gemm_out(a, b, out, bias, transpose_b, alpha, beta, accumulate);
}

void gemm_out(const Tensor& a, const Tensor& b, const Tensor& out, const OptionalTensor& bias,
              bool transpose_b, const OptionalTensor& alpha, const OptionalTensor& beta, OptionalList a_scale,
              OptionalList b_scale, std::string_view a_key, std::string_view b_key, bool accumulate) {
  if (is_quantized(a_key, b_key)) {
    check_accumulate(beta, accumulate);
    return quantized_product_out({kOutOp, {a, a_scale, a_key}, {b, b_scale, b_key}, bias, alpha, transpose_b},
                                 beta, out, accumulate);
  }
  check_plain(kOutOp, a_scale, b_scale);
  check_gemm_out(a, b, out, bias, transpose_b, alpha, beta, accumulate);
  check_apart(kOutOp, {{"out", out}}, {{"a", a}, {"b", b}, {"bias", bias}, {"alpha", alpha}, {"beta", beta}});
  const BelowAutograd guard;
  dense_gemm_out(a, transpose_b ? transposed_view(b) : b, bias, alpha, beta, out, accumulate);
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
  if (!is_quantized(a_key, b_key) && any_wants_grad(a, b, bias)) {
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
