// grouped_gemm_activation: the rows of each group times the group's matrix, then an activation times a probability; with
// its gradient.
#include "activation/node.h"
#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/ops/activation.h"
#include "common/ops/gemm.h"
#include "common/register.h"
#include "common/row_index.h"
#include "common/shared_offsets.h"
#include "common/tensor.h"
#include "gemm/dispatch/activation_gemm.h"
#include "gemm/dispatch/checks.h"
#include "gemm/ops/calls.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "grouped_gemm_activation";

TwoTensors grouped_gemm_activation_meta(const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                                        const OptionalTensor& probs, const OptionalTensor& bias,
                                        std::string_view key, bool keep_input, int64_t max_sms,
                                        int64_t expected_rows, const OptionalTensor& rows, bool) {
  const activation::NamedActivation activation = check_activation_product(
      {kOp, "a", a}, b, group_sizes, probs, bias, key, rows, {max_sms, expected_rows});
  const c10::SymInt capacity = (rows ? *rows : a).sym_size(0), columns = b.sym_size(1);
  return {empty(a, {capacity, columns / activation.columns_per_feature()}, a.scalar_type()),
          empty(a, {keep_input ? capacity : c10::SymInt(0), columns}, a.scalar_type())};
}

TwoTensors grouped_gemm_activation(const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                                   const OptionalTensor& probs, const OptionalTensor& bias,
                                   std::string_view key, bool keep_input, int64_t max_sms,
                                   int64_t expected_rows, const OptionalTensor& rows, bool zero_tail) {
  const LaunchOptions options{max_sms, expected_rows};
  const activation::NamedActivation activation =
      check_activation_product({kOp, "a", a}, b, group_sizes, probs, bias, key, rows, options);
  const BelowAutograd guard;
  const Argument a_argument{kOp, "a", a}, buffer = rows ? Argument{kOp, "rows", *rows} : a_argument;
  const Tensor offsets = group_offsets({kOp, "group_sizes", group_sizes}, buffer, buffer.tensor.size(0));
  if (rows) check_row_entries(buffer, a_argument, offsets);
  GemmProblem problem{.direction = GemmDirection::kFprop,
                      .a = {a, {}, {}},
                      .b = {b, {}, {}},
                      .offsets = offsets,
                      .bias = bias,
                      .zero_tail = zero_tail,
                      .options = options,
                      .group_sizes = group_sizes};
  if (rows) problem.a.row_index = *rows;
  const GroupedGemmActivation product{std::move(problem), probs, activation, keep_input};
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (const auto kernel = epilogue_kernel(product)) return gemm_activation_cuda(product, *kernel);
#endif
  return gemm_activation_steps(product);
}

Tensor product_of(const Tensor& a, const Tensor& b, const Tensor& sizes, const OptionalTensor& bias,
                  bool transpose_b, const OptionalTensor& rows, const LaunchOptions& options) {
  return ops::grouped_gemm(a, b, sizes, bias, std::nullopt, transpose_b, std::nullopt, std::nullopt, rows,
                           options.max_sms, options.expected_rows, std::nullopt, std::nullopt, "none", "none",
                           /*zero_tail=*/true);
}

// One result of the kernel, which its node returns. No edge leads to it.
struct Computed {
  const Tensor& result;
};

// Of the gradient of h. Places are those of the node's tensors; `place_of_bias` is 0 without a bias.
struct ProductGradients {
  Tensor a, b, bias;

  ProductGradients(AutogradContext* ctx, const Tensor& grad_h, const Tensor& a_rows, const Tensor& matrices,
                   const Tensor& sizes, const OptionalTensor& rows, size_t place_of_bias) {
    const LaunchOptions options = saved_options(ctx);
    const OptionalTensor none;
    if (ctx->needs_input_grad(0)) {
      a = product_of(grad_h, matrices, sizes, none, /*transpose_b=*/false, none, options);
      if (rows) a = ops::gather_rows_backward(a, *rows, sizes, ctx->saved_data["num_rows"].toSymInt());
    }
    if (ctx->needs_input_grad(1)) {
      b = call_grouped_gemm_wgrad(
          {.grad = grad_h, .input = a_rows, .group_sizes = sizes, .input_rows = rows, .options = options},
          std::nullopt);
    }
    if (place_of_bias > 0 && ctx->needs_input_grad(place_of_bias)) {
      bias = std::get<0>(ops::grouped_bias_backward(grad_h, sizes, none, none));
    }
  }
};

void save_product(AutogradContext* ctx, const Tensor& a, const OptionalTensor& bias,
                  const OptionalTensor& rows, const LaunchOptions& options) {
  ctx->saved_data["has_bias"] = bias.has_value();
  save_options(ctx, options);
  if (rows) ctx->saved_data["num_rows"] = a.sym_size(0);
}

// Of h and of probs, the latter undefined if not needed.
std::pair<Tensor, Tensor> gradients_of_activation(const Tensor& grad, const Tensor& h, const Tensor& sizes,
                                                  const OptionalTensor& probs, std::string_view key,
                                                  bool needs_probs_grad) {
  const auto [grad_h, grad_probs] = ops::activation_backward(grad, h, probs, std::nullopt, key);
  return {grad_h, needs_probs_grad ? activation::zero_past_groups(grad_probs, sizes) : Tensor()};
}

// Three nodes have the name of the op. With h as a result, the product and the activation have one each: torch's
// schedules that delay the gradients of weights add up the gradients of all outputs of a node that has a
// weight, so this one must have one output.
class ProductFunction : public DifferentiableOnce<ProductFunction> {
 public:
  static constexpr const char* kName = "grouped_gemm_activation";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                        const OptionalTensor& bias, const LaunchOptions& options, const OptionalTensor& rows,
                        const Computed& h) {
    save_product(ctx, a, bias, rows, options);
    ctx->save_for_backward({b.requires_grad() ? a : Tensor(), a.requires_grad() ? b : Tensor(), group_sizes,
                            or_undefined(rows)});
    return h.result;
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const SharedOffsets shared(saved[2]);
    const ProductGradients of(ctx, grads[0], saved[0], saved[1], saved[2], as_optional(saved[3]),
                              ctx->saved_data["has_bias"].toBool() ? 3 : 0);
    return {of.a, of.b, Tensor(), of.bias, Tensor(), Tensor(), Tensor()};
  }
};

class ActivationOfProductFunction : public DifferentiableOnce<ActivationOfProductFunction> {
 public:
  static constexpr const char* kName = "grouped_gemm_activation";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& h, const OptionalTensor& probs,
                        const Tensor& group_sizes, std::string_view key, const Computed& act) {
    activation::save_key(ctx, key);
    ctx->save_for_backward({h, or_undefined(probs), group_sizes});
    return act.result;
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const OptionalTensor probs = as_optional(saved[1]);
    const auto [grad_h, grad_probs] = gradients_of_activation(
        grads[0], saved[0], saved[2], probs, activation::saved_key(ctx), probs && ctx->needs_input_grad(1));
    return {grad_h, grad_probs, Tensor(), Tensor(), Tensor()};
  }
};

// Without h, which the backward computes again.
class GroupedGemmActivationFunction : public DifferentiableOnce<GroupedGemmActivationFunction> {
 public:
  static constexpr const char* kName = "grouped_gemm_activation";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                        const OptionalTensor& probs, const OptionalTensor& bias, std::string_view key,
                        const LaunchOptions& options, const OptionalTensor& rows, const Computed& act) {
    save_product(ctx, a, bias, rows, options);
    activation::save_key(ctx, key);
    ctx->save_for_backward({a, b, group_sizes, or_undefined(probs), or_undefined(bias), or_undefined(rows)});
    return act.result;
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor& sizes = saved[2];
    const SharedOffsets shared(sizes);
    const OptionalTensor probs = as_optional(saved[3]), bias = as_optional(saved[4]),
                         rows = as_optional(saved[5]);
    const LaunchOptions options = saved_options(ctx);
    const Tensor h = product_of(saved[0], saved[1], sizes, bias, /*transpose_b=*/true, rows, options);
    const auto [grad_h, grad_probs] = gradients_of_activation(
        grads[0], h, sizes, probs, activation::saved_key(ctx), probs && ctx->needs_input_grad(3));
    // needs_input_grad does not count tensors that are not given.
    const ProductGradients of(ctx, grad_h, saved[0], saved[1], sizes, rows, bias ? (probs ? 4 : 3) : 0);
    return {of.a, of.b, Tensor(), grad_probs, of.bias, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

TwoTensors grouped_gemm_activation_autograd(const Tensor& a, const Tensor& b, const Tensor& group_sizes,
                                            const OptionalTensor& probs, const OptionalTensor& bias,
                                            std::string_view key, bool keep_input, int64_t max_sms,
                                            int64_t expected_rows, const OptionalTensor& rows,
                                            bool zero_tail) {
  const LaunchOptions options{max_sms, expected_rows};
  const auto [act, h] = [&] {
    const BelowAutograd guard;
    return ops::grouped_gemm_activation(a, b, group_sizes, probs, bias, key, keep_input, max_sms,
                                        expected_rows, rows, zero_tail);
  }();
  if (!any_requires_grad(a, b, probs, bias)) return {act, h};
  if (!keep_input) {
    return {GroupedGemmActivationFunction::apply(a, b, group_sizes, probs, bias, key, options, rows,
                                                 Computed{act}),
            h};
  }
  const Tensor product = ProductFunction::apply(a, b, group_sizes, bias, options, rows, Computed{h});
  return {ActivationOfProductFunction::apply(product, probs, group_sizes, key, Computed{act}), product};
}

}  // namespace

TP_IMPL(grouped_gemm_activation, grouped_gemm_activation, grouped_gemm_activation_meta,
        grouped_gemm_activation_autograd);

}  // namespace transformer_plugin::gemm
