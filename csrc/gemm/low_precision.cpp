#include "gemm/low_precision.h"

#include <ATen/ops/full.h>
#include <ATen/ops/randint.h>

#include <limits>

#include "common/autograd.h"
#include "common/check.h"
#include "gemm/calls.h"
#include "gemm/code_product.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Data with what its values are scaled by; undefined where it is not wanted or there is none.
struct Scaled {
  Tensor data, scale, amax;
};

// A matrix in a format, along its rows and along its columns (returned transposed).
struct Rounded {
  Scaled rows, columns;
};

// One rounding serves both directions when the scale does not depend on the direction.
bool one_scale(const Format& format) { return !format.has_blocks(); }

// What NVFP4 is given beside a matrix: its amaxes now, and a seed from torch's generator.
struct Given {
  Tensor amax, amax_t, seed;
};

Given given_for(const Tensor& x, const OptionalTensor& group_sizes, const Format& format,
                std::string_view key, bool rows, bool columns) {
  Given given;
  if (!format.is_nv()) return given;
  if (rows && columns) {
    std::tie(given.amax, given.amax_t) = call_amax_both(x, group_sizes, key);
  } else if (rows) {
    given.amax = call_amax(x, group_sizes, key);
  } else {
    given.amax_t = call_amax_transposed(x, group_sizes, key);
  }
  if (format.stochastic_rounding) {
    given.seed = at::randint(std::numeric_limits<int64_t>::max(), {1}, x.options().dtype(at::kLong));
  }
  return given;
}

Rounded round_in_blocks(const Tensor& x, const OptionalTensor& group_sizes, const Format& format,
                        std::string_view key, bool rows, bool columns) {
  Rounded result;
  const Given given = given_for(x, group_sizes, format, key, rows, columns);
  const OptionalTensor amax = as_optional(given.amax), amax_t = as_optional(given.amax_t),
                       seed = as_optional(given.seed);
  auto& [row, column] = result;
  if (rows && columns) {
    std::tie(row.data, row.scale, column.data, column.scale) =
        call_quantize_both(x, group_sizes, key, amax, amax_t, seed);
  } else if (rows) {
    std::tie(row.data, row.scale) = call_quantize(x, group_sizes, key, amax, seed);
  } else {
    std::tie(column.data, column.scale) = call_quantize_transposed(x, group_sizes, key, amax_t, seed);
  }
  row.amax = given.amax;
  column.amax = given.amax_t;
  return result;
}

Rounded round_matrix(const Tensor& x, const OptionalTensor& group_sizes, const Format& format,
                     std::string_view key, bool rows, bool columns) {
  Rounded result;
  if (format.family == FormatFamily::kBFloat16) {
    result.rows.data = x.to(at::kBFloat16);
    result.columns.data = result.rows.data.t();
  } else if (one_scale(format)) {
    std::tie(result.rows.data, result.rows.scale) = call_quantize(x, group_sizes, key);
    result.columns = {result.rows.data.t(), result.rows.scale, Tensor()};
  } else if (rows || columns) {
    result = round_in_blocks(x, group_sizes, format, key, rows, columns);
  }
  return result;
}

// A gradient in its format; and its sums over the rows, the gradient of a bias, where one op reads it once for both.
struct RoundedGradient {
  Rounded values;
  Tensor bias;  // undefined, or [N], or [G, N] with group sizes
};

RoundedGradient round_gradient(const Tensor& grad, const OptionalTensor& group_sizes, const Format& format,
                               std::string_view key, bool rows, bool columns, bool with_bias) {
  if (!with_bias || !format.is_quantized() || format.is_nv()) {
    return {round_matrix(grad, group_sizes, format, key, rows, columns), Tensor()};
  }
  const bool one = one_scale(format);
  const BiasBackwardQuantized quantized =
      call_bias_backward_quantize(grad, group_sizes, key, rows || one, columns && !one);
  Rounded values{{quantized.data, quantized.scale, Tensor()},
                 {quantized.data_t, quantized.scale_t, Tensor()}};
  if (one) values.columns = {quantized.data.t(), quantized.scale, Tensor()};
  return {values, quantized.bias};
}

// The groups by which input and gradient are rounded along their columns: those of the rows, or none; and while a
// graph with an unknown number of rows is traced, all rows as one group. That gives the same bits, but scales of at
// least two block rows: torch guards on a dimension that may be 1, and would compile again when the rows no longer
// fit one block.
OptionalTensor column_groups(const Tensor& input, const OptionalTensor& group_sizes,
                             const RoleFormats& formats) {
  const bool blocks = formats.input.family == FormatFamily::kFp8Block && !formats.input.square_blocks &&
                      !formats.grad.square_blocks;
  if (group_sizes || !blocks || !input.sym_size(0).is_symbolic()) return group_sizes;
  return at::full_symint({1}, c10::Scalar(input.sym_size(0)), input.options().dtype(at::kLong));
}

// A weight [.., N, K] for the forward product, as b with transpose_b; and for the data gradient.
struct RoundedWeight {
  Scaled forward;
  Scaled backward;  // b with transpose_b if it is rounded along its columns
};

// Whether the data gradient takes the weight along its columns: where its values are others than along its rows; or the
// same, but kernels multiply blocks as they are, what is summed over in one line.
bool rounds_weight_columns(const Tensor& weight, const RoleFormats& formats) {
  return !formats.symmetric_weight() ||
         (formats.weight.has_blocks() && code_product_scales(formats.grad, formats.weight) &&
          has_code_kernels(weight));
}

RoundedWeight round_weight(const Tensor& weight, const RoleFormats& formats, bool backward) {
  const bool both = backward && rounds_weight_columns(weight, formats);
  if (formats.weight.family == FormatFamily::kBFloat16) {
    const Scaled rounded{weight.to(at::kBFloat16), Tensor(), Tensor()};
    return {rounded, backward ? rounded : Scaled{}};
  }
  RoundedWeight result;
  if (one_scale(formats.weight)) {
    std::tie(result.forward.data, result.forward.scale) =
        call_quantize(weight, std::nullopt, formats.weight_key);
  } else {
    Rounded rounded = round_in_blocks(weight, std::nullopt, formats.weight, formats.weight_key, true, both);
    result = {std::move(rounded.rows), std::move(rounded.columns)};
  }
  if (backward && !both) result.backward = result.forward;
  return result;
}

struct Operand {
  const Scaled& values;
  std::string_view key;
};

Tensor multiply(const Operand& a, const Operand& b, const OptionalTensor& group_sizes,
                const OptionalTensor& bias, const OptionalTensor& bias_scale, bool transpose_b,
                at::ScalarType dtype) {
  const Scaled &left = a.values, &right = b.values;
  if (!left.scale.defined()) {
    return group_sizes
               ? call_grouped_gemm(left.data, right.data, *group_sizes, bias, bias_scale, transpose_b, dtype)
               : call_gemm(left.data, right.data, bias, transpose_b, dtype);
  }
  return group_sizes
             ? call_grouped_gemm_quantized(left.data, left.scale, right.data, right.scale, *group_sizes,
                                           a.key, b.key, dtype, bias, bias_scale, transpose_b,
                                           as_optional(left.amax), as_optional(right.amax))
             : call_gemm_quantized(left.data, left.scale, right.data, right.scale, a.key, b.key, dtype, bias,
                                   transpose_b, as_optional(left.amax), as_optional(right.amax));
}

// grad^T @ input, from both along their columns: [N, K], or one for each group.
Tensor multiply_columns(const Operand& grad, const Operand& input, const OptionalTensor& group_sizes,
                        at::ScalarType dtype) {
  if (!group_sizes) return multiply(grad, input, std::nullopt, std::nullopt, std::nullopt, true, dtype);
  const Scaled &g = grad.values, &x = input.values;
  if (!g.scale.defined()) return call_grouped_gemm_wgrad(g.data.t(), x.data.t(), *group_sizes, dtype);
  return call_grouped_gemm_wgrad_quantized(g.data, g.scale, x.data, x.scale, *group_sizes, grad.key,
                                           input.key, dtype, as_optional(g.amax), as_optional(x.amax));
}

Tensor multiply_forward(const LayerArguments& layer, const RoleFormats& formats, const Rounded& input,
                        const RoundedWeight& weight) {
  return multiply({input.rows, formats.input_key}, {weight.forward, formats.weight_key}, layer.group_sizes,
                  layer.bias, layer.bias_scale, true, layer.input.scalar_type());
}

class LowPrecisionFunction : public torch::autograd::Function<LowPrecisionFunction> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& group_sizes, const OptionalTensor& bias,
                        const OptionalTensor& bias_scale, std::string_view input_key,
                        std::string_view weight_key, std::string_view grad_key) {
    const RoleFormats formats = role_formats("linear", input_key, weight_key, grad_key);
    const bool wants_input = input.requires_grad(), wants_weight = weight.requires_grad();
    const BelowAutograd guard;
    const OptionalTensor column_sizes =
        wants_weight ? column_groups(input, group_sizes, formats) : group_sizes;
    const Rounded x = round_matrix(input, column_sizes, formats.input, input_key, true, wants_weight);
    const RoundedWeight w = round_weight(weight, formats, wants_input);
    ctx->saved_data["weight_columns"] = rounds_weight_columns(weight, formats);
    // The columns of one rounding are a view of its rows; the rows of two are not needed again.
    const Scaled columns = wants_weight ? x.columns : Scaled{};
    ctx->save_for_backward({columns.data, columns.scale, columns.amax, w.backward.data, w.backward.scale,
                            w.backward.amax, or_undefined(group_sizes),
                            wants_grad(bias_scale) ? *bias : Tensor(), or_undefined(bias_scale),
                            or_undefined(column_sizes)});
    ctx->saved_data["input_format"] = std::string(input_key);
    ctx->saved_data["weight_format"] = std::string(weight_key);
    ctx->saved_data["grad_format"] = std::string(grad_key);
    ctx->saved_data["weight_dtype"] = weight.scalar_type();
    ctx->saved_data["has_bias"] = bias.has_value();
    return multiply_forward({input, weight, group_sizes, bias, bias_scale}, formats, x, w);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const std::string input_key = ctx->saved_data["input_format"].toStringRef();
    const std::string weight_key = ctx->saved_data["weight_format"].toStringRef();
    const std::string grad_key = ctx->saved_data["grad_format"].toStringRef();
    const RoleFormats formats = role_formats("linear", input_key, weight_key, grad_key);
    const Scaled input{saved[0], saved[1], saved[2]}, weight{saved[3], saved[4], saved[5]};
    const OptionalTensor group_sizes = as_optional(saved[6]), column_sizes = as_optional(saved[9]);
    const Tensor& grad = grads[0];
    const bool wants_input = ctx->needs_input_grad(0), wants_weight = ctx->needs_input_grad(1);
    const bool wants_bias =
        ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(group_sizes ? 3 : 2);
    Tensor grad_input, grad_weight, grad_bias, grad_scale;
    if (wants_input || wants_weight) {
      const auto [g, bias] = round_gradient(grad, column_sizes, formats.grad, grad_key, wants_input,
                                            wants_weight, wants_bias && !saved[8].defined());
      grad_bias = bias;
      if (wants_input) {
        grad_input = multiply({g.rows, grad_key}, {weight, weight_key}, group_sizes, std::nullopt,
                              std::nullopt, ctx->saved_data["weight_columns"].toBool(), grad.scalar_type());
      }
      if (wants_weight) {
        grad_weight = multiply_columns({g.columns, grad_key}, {input, input_key}, column_sizes,
                                       ctx->saved_data["weight_dtype"].toScalarType());
        if (column_sizes && !group_sizes) grad_weight = grad_weight.squeeze(0);
      }
      if (grad_bias.defined() && column_sizes && !group_sizes) grad_bias = grad_bias.squeeze(0);
    }
    if (!grad_bias.defined()) {
      std::tie(grad_bias, grad_scale) = bias_gradients_of(ctx, grad, group_sizes, saved[7], saved[8]);
    }
    return {grad_input, grad_weight, Tensor(), grad_bias, grad_scale, Tensor(), Tensor(), Tensor()};
  }

  // From the gradient before it is rounded to its format.
  static std::pair<Tensor, Tensor> bias_gradients_of(AutogradContext* ctx, const Tensor& grad,
                                                     const OptionalTensor& group_sizes, const Tensor& bias,
                                                     const Tensor& bias_scale) {
    const bool has_bias = ctx->saved_data["has_bias"].toBool();
    if (group_sizes) return bias_gradients(ctx, has_bias, grad, *group_sizes, bias, bias_scale);
    if (!has_bias || !ctx->needs_input_grad(2)) return {};
    return {call_bias_backward(grad), Tensor()};
  }
};

void check_family(const char* op, const char* argument, const Format& format, std::string_view key,
                  const RoleFormats& formats) {
  TP_CHECK_VALUE(format.family == formats.input.family, op, argument,
                 "a format of the family of input_format, '" << formats.input_key << "'", "'" << key << "'",
                 "Take all three formats from one recipe");
}

// A random Hadamard transform is of both factors of the weight's gradient, where it cancels, and of nothing else.
void check_rotations(const char* op, const RoleFormats& formats) {
  TP_CHECK_VALUE(!formats.weight.random_hadamard, op, "weight_format",
                 "no 'rht', which only the other two formats may have together",
                 "'" << formats.weight_key << "'", "Take all three formats from one recipe");
  TP_CHECK_VALUE(formats.grad.random_hadamard == formats.input.random_hadamard, op, "grad_format",
                 "'rht' if and only if input_format, '" << formats.input_key << "', has it",
                 "'" << formats.grad_key << "'", "Take all three formats from one recipe");
}

}  // namespace

RoleFormats role_formats(const char* op, std::string_view input, std::string_view weight,
                         std::string_view grad) {
  if (input == "none" && weight == "none" && grad == "none") return {input, weight, grad, {}, {}, {}};
  const RoleFormats formats{input,
                            weight,
                            grad,
                            parse_format(op, "input_format", input),
                            parse_format(op, "weight_format", weight),
                            parse_format(op, "grad_format", grad)};
  check_family(op, "weight_format", formats.weight, weight, formats);
  check_family(op, "grad_format", formats.grad, grad, formats);
  check_rotations(op, formats);
  return formats;
}

Tensor low_precision_forward(const LayerArguments& layer, const RoleFormats& formats) {
  const Rounded input =
      round_matrix(layer.input, layer.group_sizes, formats.input, formats.input_key, true, false);
  return multiply_forward(layer, formats, input, round_weight(layer.weight, formats, false));
}

Tensor low_precision_product(const LayerArguments& layer, const RoleFormats& formats) {
  return LowPrecisionFunction::apply(layer.input, layer.weight, layer.group_sizes, layer.bias,
                                     layer.bias_scale, formats.input_key, formats.weight_key,
                                     formats.grad_key);
}

}  // namespace transformer_plugin::gemm
