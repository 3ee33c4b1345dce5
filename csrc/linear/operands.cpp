#include "linear/operands.h"

#include <ATen/ops/isnan.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/randint.h>

#include <limits>

#include "common/autograd.h"
#include "gemm/dispatch/quantized_gemm.h"
#include "gemm/ops/calls.h"
#include "linear/nonfinite.h"
#include "quantize/ops/calls.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// One rounding serves both directions when the scale does not depend on the direction, and columns are a view of rows; unless
// kernels multiply codes as they are, which want what is summed over in one line.
bool columns_are_views(const Format& format, const Tensor& like) {
  return !format.has_blocks() && !has_quantized_kernels(like);
}

// What NVFP4 is given beside a matrix: its amaxes now, and a seed from torch's generator.
struct Given {
  Tensor amax, amax_t, seed;
};

Given given_for(const Tensor& x, const OptionalTensor& group_sizes, const Format& format,
                std::string_view key, bool rows, bool columns) {
  Given given;
  if (!format.is_nv()) return given;
  if (rows && columns) {
    std::tie(given.amax, given.amax_t) = quantize::call_amax_both(x, group_sizes, key);
  } else if (rows) {
    given.amax = quantize::call_amax(x, group_sizes, key);
  } else {
    given.amax_t = quantize::call_amax_transposed(x, group_sizes, key);
  }
  if (format.stochastic_rounding) {
    given.seed = at::randint(std::numeric_limits<int64_t>::max(), {1}, x.options().dtype(at::kLong));
  }
  return given;
}

Rounded round_in_directions(const Tensor& x, const OptionalTensor& group_sizes, const Format& format,
                            std::string_view key, bool rows, bool columns) {
  Rounded result;
  const Given given = given_for(x, group_sizes, format, key, rows, columns);
  const OptionalTensor amax = as_optional(given.amax), amax_t = as_optional(given.amax_t),
                       seed = as_optional(given.seed);
  auto& [row, column] = result;
  if (rows && columns) {
    std::tie(row.data, row.scale, column.data, column.scale) =
        quantize::call_quantize_both(x, group_sizes, key, amax, amax_t, seed);
  } else if (rows) {
    std::tie(row.data, row.scale) = quantize::call_quantize(x, group_sizes, key, amax, seed);
  } else {
    std::tie(column.data, column.scale) =
        quantize::call_quantize_transposed(x, group_sizes, key, amax_t, seed);
  }
  row.amax = given.amax;
  column.amax = given.amax_t;
  return result;
}

// In place. Of bf16 there is nothing.
void mark_scales(const Scaled& values, const Tensor& mark) {
  if (values.amax.defined()) {
    values.amax.mul_(mark);
  } else if (values.scale.defined() && values.scale.scalar_type() == at::kFloat) {
    values.scale.mul_(mark);
  } else if (values.scale.defined()) {
    values.scale.view(at::kByte).masked_fill_(at::isnan(mark), 255);  // the NaN of E8M0
  }
}

// What the values of `x` are scaled by becomes NaN, if the key says so and `x` is not finite.
void mark_scales(const Rounded& rounded, const Tensor& x, const OptionalTensor& group_sizes,
                 std::string_view key) {
  if (!marks_nonfinite(key)) return;
  const Tensor mark = nonfinite_mark(x, group_sizes);
  mark_scales(rounded.rows, mark);
  mark_scales(rounded.columns, mark);
}

}  // namespace

// Not by asking .to() for nothing: below autograd an op may not return what it was given.
Tensor as_bfloat16(const Tensor& x, const OptionalTensor& group_sizes, std::string_view key) {
  const Tensor rounded = x.scalar_type() == at::kBFloat16 ? x : x.to(at::kBFloat16);
  return marks_nonfinite(key) ? at::mul(rounded, nonfinite_mark(x, group_sizes)) : rounded;
}

std::string layer_key(std::string_view key, const Tensor& like, const OptionalTensor& group_sizes) {
  std::string result(key);
  if (!group_sizes || !has_quantized_kernels(like)) return result;
  const Format format = parse_format("grouped_linear", "format", key);
  const bool fp8 = format.family == FormatFamily::kFp8Tensor || format.family == FormatFamily::kFp8Block;
  if (!fp8 || format.aligned_groups) return result;
  return result + (key.find(':') == std::string_view::npos ? ":aligned" : ",aligned");
}

Rounded round_matrix(const Tensor& x, const OptionalTensor& group_sizes, const Format& format,
                     std::string_view key, bool rows, bool columns) {
  Rounded result;
  if (format.family == FormatFamily::kBFloat16) {
    result.rows.data = as_bfloat16(x, group_sizes, key);
    result.columns.data = result.rows.data.t();
  } else if (columns_are_views(format, x)) {
    std::tie(result.rows.data, result.rows.scale) = quantize::call_quantize(x, group_sizes, key);
    result.columns = {result.rows.data.t(), result.rows.scale, Tensor()};
  } else if (rows || columns) {
    result = round_in_directions(x, group_sizes, format, key, rows, columns);
  }
  mark_scales(result, x, group_sizes, key);
  return result;
}

RoundedGradient round_gradient(const Tensor& grad, const OptionalTensor& group_sizes, const Format& format,
                               std::string_view key, bool rows, bool columns, bool with_bias) {
  if (!with_bias || !format.is_quantized() || format.is_nv()) {
    return {round_matrix(grad, group_sizes, format, key, rows, columns), Tensor()};
  }
  const bool one = columns_are_views(format, grad);
  const quantize::BiasBackwardQuantized quantized =
      quantize::call_bias_backward_quantize(grad, group_sizes, key, rows || one, columns && !one);
  Rounded values{{quantized.data, quantized.scale, Tensor()},
                 {quantized.data_t, quantized.scale_t, Tensor()}};
  if (one) values.columns = {quantized.data.t(), quantized.scale, Tensor()};
  mark_scales(values, grad, group_sizes, key);
  return {values, quantized.bias};
}

bool rounds_weight_columns(const Tensor& weight, const RoleFormats& formats) {
  return !formats.symmetric_weight() ||
         (quantized_gemm_scales(formats.grad, formats.weight) && has_quantized_kernels(weight));
}

RoundedWeight round_weight(const Tensor& weight, const RoleFormats& formats, bool backward) {
  const bool both = backward && rounds_weight_columns(weight, formats);
  if (formats.weight.family == FormatFamily::kBFloat16) {
    const Scaled rounded{as_bfloat16(weight, std::nullopt, formats.weight_key), Tensor(), Tensor()};
    return {rounded, backward ? rounded : Scaled{}};
  }
  RoundedWeight result;
  Rounded rounded = round_in_directions(weight, std::nullopt, formats.weight, formats.weight_key, true, both);
  mark_scales(rounded, weight, std::nullopt, formats.weight_key);
  result = {std::move(rounded.rows), std::move(rounded.columns)};
  if (backward && !both) result.backward = result.forward;
  return result;
}

// The amaxes come last: nothing is written where a buffer is refused.
void round_weight_out(const Tensor& weight, const RoleFormats& formats, const RoundedWeight& out) {
  const auto& [row, column] = out;
  if (formats.weight.family == FormatFamily::kBFloat16) {
    row.data.copy_(weight);
    if (marks_nonfinite(formats.weight_key)) row.data.mul_(nonfinite_mark(weight, std::nullopt));
    return;
  }
  const bool both = rounds_weight_columns(weight, formats);
  const Given given = given_for(weight, std::nullopt, formats.weight, formats.weight_key, true, both);
  quantize::call_quantize_out(weight, formats.weight_key, row.data, row.scale, both ? column.data : Tensor(),
                              both ? column.scale : Tensor(), as_optional(given.amax),
                              as_optional(given.amax_t), as_optional(given.seed));
  if (given.amax.defined()) row.amax.copy_(given.amax);
  if (given.amax_t.defined()) column.amax.copy_(given.amax_t);
  mark_scales({row, both ? column : Scaled{}}, weight, std::nullopt, formats.weight_key);
}

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

Tensor multiply_columns(const Operand& grad, const Operand& input, const OptionalTensor& group_sizes,
                        at::ScalarType dtype) {
  if (!group_sizes) return multiply(grad, input, std::nullopt, std::nullopt, std::nullopt, true, dtype);
  const Scaled &g = grad.values, &x = input.values;
  if (!g.scale.defined()) return call_grouped_gemm_wgrad(g.data.t(), x.data.t(), *group_sizes, dtype);
  return call_grouped_gemm_wgrad_quantized(g.data, g.scale, x.data, x.scale, *group_sizes, grad.key,
                                           input.key, dtype, as_optional(g.amax), as_optional(x.amax));
}

}  // namespace transformer_plugin::gemm
