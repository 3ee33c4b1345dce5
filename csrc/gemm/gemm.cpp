// gemm: a [M, K] times b, with its gradient.
#include <torch/library.h>

#include "common/autograd.h"
#include "common/tensor.h"
#include "gemm/calls.h"
#include "gemm/checks.h"
#include "gemm/dense_product.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalDtype = std::optional<at::ScalarType>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Returns the output's dtype.
at::ScalarType check_gemm(const Tensor& a, const Tensor& b, const OptionalTensor& bias, bool transpose_b,
                          OptionalDtype dtype) {
  constexpr const char* op = "gemm";
  const Argument a_argument{op, "a", a};
  const Argument b_argument{op, "b", b};
  check_operand(a_argument, 2);
  check_pair(b_argument, a_argument, 2);
  check_size(b_argument, transpose_b ? 1 : 0, a.sym_size(1), "the columns of 'a', summed over");
  if (bias) check_bias({op, "bias", *bias}, a_argument, std::nullopt, b.sym_size(transpose_b ? 0 : 1));
  return output_dtype(a_argument, dtype);
}

Tensor gemm_meta(const Tensor& a, const Tensor& b, const OptionalTensor& bias, bool transpose_b,
                 OptionalDtype dtype) {
  const at::ScalarType to = check_gemm(a, b, bias, transpose_b, dtype);
  return empty(a, {a.sym_size(0), b.sym_size(transpose_b ? 0 : 1)}, to);
}

Tensor gemm(const Tensor& a, const Tensor& b, const OptionalTensor& bias, bool transpose_b,
            OptionalDtype dtype) {
  const at::ScalarType to = check_gemm(a, b, bias, transpose_b, dtype);
  const BelowAutograd guard;
  return dense_product(a, transpose_b ? transposed_view(b) : b, bias, to);
}

class GemmFunction : public torch::autograd::Function<GemmFunction> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b, const OptionalTensor& bias,
                        bool transpose_b, OptionalDtype dtype) {
    ctx->save_for_backward({b.requires_grad() ? a : Tensor(), a.requires_grad() ? b : Tensor()});
    ctx->saved_data["transpose_b"] = transpose_b;
    ctx->saved_data["has_bias"] = bias.has_value();
    const BelowAutograd guard;
    return call_gemm(a, b, bias, transpose_b, dtype);
  }

  // A gradient comes back in the dtype of the sum's rounding; the engine rounds it to its leaf's.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const bool transpose_b = ctx->saved_data["transpose_b"].toBool();
    const Tensor& grad = grads[0];
    Tensor grad_a, grad_b, grad_bias;
    if (ctx->needs_input_grad(0)) {
      const auto [g, b] = same_dtype(grad, saved[1]);
      grad_a = call_gemm(g, b, std::nullopt, !transpose_b, saved[1].scalar_type());
    }
    if (ctx->needs_input_grad(1)) {
      const auto [g, a] = same_dtype(grad, saved[0]);
      grad_b = transpose_b ? call_gemm(g.t(), a, std::nullopt, false, saved[0].scalar_type())
                           : call_gemm(a.t(), g, std::nullopt, false, saved[0].scalar_type());
    }
    const bool has_bias = ctx->saved_data["has_bias"].toBool();
    if (has_bias && ctx->needs_input_grad(2)) grad_bias = call_bias_backward(grad);
    return {grad_a, grad_b, grad_bias, Tensor(), Tensor()};
  }
};

Tensor gemm_autograd(const Tensor& a, const Tensor& b, const OptionalTensor& bias, bool transpose_b,
                     OptionalDtype dtype) {
  if (any_wants_grad(a, b, bias)) return GemmFunction::apply(a, b, bias, transpose_b, dtype);
  const BelowAutograd guard;
  return call_gemm(a, b, bias, transpose_b, dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(transformer_plugin, CPU, m) { m.impl("gemm", gemm); }
TORCH_LIBRARY_IMPL(transformer_plugin, Meta, m) { m.impl("gemm", gemm_meta); }
TORCH_LIBRARY_IMPL(transformer_plugin, Autograd, m) { m.impl("gemm", gemm_autograd); }
#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin, CUDA, m) { m.impl("gemm", gemm); }
#endif

}  // namespace transformer_plugin::gemm
