// grouped_gemm: the rows of each group times the group's own matrix, with its gradient.
#include <torch/library.h>

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/tensor.h"
#include "gemm/calls.h"
#include "gemm/checks.h"
#include "gemm/grouped_product.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalDtype = std::optional<at::ScalarType>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Returns the output's dtype.
at::ScalarType check_grouped_gemm(const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                                  const OptionalTensor& bias, const OptionalTensor& bias_scale,
                                  bool transpose_b, OptionalDtype dtype) {
  constexpr const char* op = "grouped_gemm";
  const Argument a_argument{op, "a", a};
  const Argument b_argument{op, "b", b};
  check_grouped_operand(a_argument, 2);
  check_pair(b_argument, a_argument, 3);
  check_size(b_argument, transpose_b ? 2 : 1, a.sym_size(1), "the columns of 'a', summed over");
  check_groups({op, "group_sizes", group_sizes}, a_argument, b_argument);
  if (bias) check_bias({op, "bias", *bias}, a_argument, b.sym_size(0), b.sym_size(transpose_b ? 1 : 2));
  if (bias_scale) check_bias_scale({op, "bias_scale", *bias_scale}, bias.has_value(), a_argument);
  return output_dtype(a_argument, dtype);
}

Tensor grouped_gemm_meta(const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                         const OptionalTensor& bias, const OptionalTensor& bias_scale, bool transpose_b,
                         OptionalDtype dtype) {
  const at::ScalarType to = check_grouped_gemm(a, b, group_sizes, bias, bias_scale, transpose_b, dtype);
  return empty(a, {a.sym_size(0), b.sym_size(transpose_b ? 1 : 2)}, to);
}

Tensor grouped_gemm(const Tensor& a, const Tensor& b, const Tensor& group_sizes, const OptionalTensor& bias,
                    const OptionalTensor& bias_scale, bool transpose_b, OptionalDtype dtype) {
  const at::ScalarType to = check_grouped_gemm(a, b, group_sizes, bias, bias_scale, transpose_b, dtype);
  const BelowAutograd guard;
  const Tensor offsets =
      group_offsets({"grouped_gemm", "group_sizes", group_sizes}, {"grouped_gemm", "a", a}, a.size(0));
  return row_product({a, b, offsets, bias, bias_scale, transpose_b}, to);
}

class GroupedGemmFunction : public torch::autograd::Function<GroupedGemmFunction> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                        const OptionalTensor& bias, const OptionalTensor& bias_scale, bool transpose_b,
                        OptionalDtype dtype) {
    ctx->save_for_backward({b.requires_grad() ? a : Tensor(), a.requires_grad() ? b : Tensor(), group_sizes,
                            wants_grad(bias_scale) ? *bias : Tensor(), or_undefined(bias_scale)});
    ctx->saved_data["transpose_b"] = transpose_b;
    ctx->saved_data["has_bias"] = bias.has_value();
    const BelowAutograd guard;
    return call_grouped_gemm(a, b, group_sizes, bias, bias_scale, transpose_b, dtype);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &grad = grads[0], &sizes = saved[2];
    const bool transpose_b = ctx->saved_data["transpose_b"].toBool();
    Tensor grad_a, grad_b;
    if (ctx->needs_input_grad(0)) {
      const auto [g, b] = same_dtype(grad, saved[1]);
      grad_a =
          call_grouped_gemm(g, b, sizes, std::nullopt, std::nullopt, !transpose_b, saved[1].scalar_type());
    }
    if (ctx->needs_input_grad(1)) {
      const auto [g, a] = same_dtype(grad, saved[0]);
      grad_b = transpose_b ? call_grouped_gemm_wgrad(g, a, sizes, saved[0].scalar_type())
                           : call_grouped_gemm_wgrad(a, g, sizes, saved[0].scalar_type());
    }
    const bool has_bias = ctx->saved_data["has_bias"].toBool();
    const auto [grad_bias, grad_scale] = bias_gradients(ctx, has_bias, grad, sizes, saved[3], saved[4]);
    return {grad_a, grad_b, Tensor(), grad_bias, grad_scale, Tensor(), Tensor()};
  }
};

Tensor grouped_gemm_autograd(const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                             const OptionalTensor& bias, const OptionalTensor& bias_scale, bool transpose_b,
                             OptionalDtype dtype) {
  if (any_wants_grad(a, b, bias, bias_scale)) {
    return GroupedGemmFunction::apply(a, b, group_sizes, bias, bias_scale, transpose_b, dtype);
  }
  const BelowAutograd guard;
  return call_grouped_gemm(a, b, group_sizes, bias, bias_scale, transpose_b, dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(transformer_plugin, CPU, m) { m.impl("grouped_gemm", grouped_gemm); }
TORCH_LIBRARY_IMPL(transformer_plugin, Meta, m) { m.impl("grouped_gemm", grouped_gemm_meta); }
TORCH_LIBRARY_IMPL(transformer_plugin, Autograd, m) { m.impl("grouped_gemm", grouped_gemm_autograd); }
#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin, CUDA, m) { m.impl("grouped_gemm", grouped_gemm); }
#endif

}  // namespace transformer_plugin::gemm
