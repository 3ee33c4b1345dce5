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

namespace transformer_plugin::linear {

using namespace gemm;  // layers are made of its ops and checks
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// With one scale per tensor the columnwise operand can be a transposed view of the rowwise one; not for the FP8 kernels, which
// need K-major data.
bool columns_are_views(const Format& format, const Tensor& like) {
  return format.family == FormatFamily::kFp8Tensor && !has_quantized_kernels(like);
}

// A transposed view of rowwise data with one scale.
Quantized transposed_view_of(const Quantized& rowwise) {
  return {rowwise.data.t(), rowwise.scale, Tensor(), rowwise.format, rowwise.key, true};
}

// What quantizing to NVFP4 needs besides the matrix: its amaxes, and a seed from torch's generator for stochastic rounding.
struct Nvfp4Inputs {
  Tensor amax, amax_t, seed;
};

Nvfp4Inputs nvfp4_inputs(const Tensor& x, const OptionalTensor& group_sizes, const Format& format,
                         std::string_view key, bool rows, bool columns) {
  Nvfp4Inputs given;
  if (!format.is_nv()) return given;
  quantize::AmaxPair amaxes = quantize::call_amax(x, key, group_sizes, {rows, columns});
  given.amax = std::move(amaxes.amax);
  given.amax_t = std::move(amaxes.amax_t);
  if (format.stochastic_rounding) {
    given.seed = at::randint(std::numeric_limits<int64_t>::max(), {1}, x.options().dtype(at::kLong));
  }
  return given;
}

QuantizedOperand quantize_directions(const Tensor& x, const OptionalTensor& group_sizes, const Format& format,
                                     std::string_view key, bool rows, bool columns) {
  const Nvfp4Inputs given = nvfp4_inputs(x, group_sizes, format, key, rows, columns);
  QuantizedOperand result =
      operand_of(quantize::call_quantize(x, key, group_sizes, {rows, columns}, as_optional(given.amax),
                                         as_optional(given.amax_t), as_optional(given.seed)),
                 format, key);
  result.rowwise.amax = given.amax;
  result.columnwise.amax = given.amax_t;
  return result;
}

// In place. bf16 has no scale.
void mark_nonfinite_scales(const Quantized& values, const Tensor& mark) {
  if (values.amax.defined()) {
    values.amax.mul_(mark);
  } else if (values.scale.defined() && values.scale.scalar_type() == at::kFloat) {
    values.scale.mul_(mark);
  } else if (values.scale.defined()) {
    values.scale.view(at::kByte).masked_fill_(at::isnan(mark), 255);  // the NaN of E8M0
  }
}

// Makes the scales NaN if the key has the option `nan` and `x` is not finite.
void mark_nonfinite_scales(const QuantizedOperand& rounded, const Tensor& x,
                           const OptionalTensor& group_sizes, std::string_view key) {
  if (!marks_nonfinite(key)) return;
  const Tensor mark = nonfinite_factor(x, group_sizes);
  mark_nonfinite_scales(rounded.rowwise, mark);
  mark_nonfinite_scales(rounded.columnwise, mark);
}

// [scale_inv], or of NVFP4 [scale_inv, amax], as the GEMM ops take it; none of unquantized values.
class Scales {
 public:
  explicit Scales(const Quantized& values)
      : tensors_{values.scale, values.amax}, count_(values.amax.defined() ? 2 : values.scale.defined()) {}
  at::TensorList get() const { return {tensors_, count_}; }

 private:
  const Tensor tensors_[2];
  const size_t count_;
};

// Unquantized values, in bfloat16, have no format for the GEMM ops.
QuantizedKeys keys_of(const Quantized& a, const Scales& a_scale, const Quantized& b, const Scales& b_scale) {
  if (a_scale.get().empty()) return {};
  return {a_scale.get(), b_scale.get(), a.key, b.key};
}

}  // namespace

QuantizedOperand operand_of(quantize::Outputs&& outputs, const Format& format, std::string_view key) {
  return {{std::move(outputs.data), std::move(outputs.scale), Tensor(), format, key, false},
          {std::move(outputs.data_t), std::move(outputs.scale_t), Tensor(), format, key, true}};
}

// Not by a .to() that changes nothing: an op below autograd must not return its argument.
Tensor as_bfloat16(const Tensor& x, const OptionalTensor& group_sizes, std::string_view key) {
  const Tensor rounded = x.scalar_type() == at::kBFloat16 ? x : x.to(at::kBFloat16);
  return marks_nonfinite(key) ? at::mul(rounded, nonfinite_factor(x, group_sizes)) : rounded;
}

QuantizedOperand quantize_operand(const Tensor& x, const OptionalTensor& group_sizes, const Format& format,
                                  std::string_view key, bool rows, bool columns) {
  QuantizedOperand result;
  if (format.family == FormatFamily::kBFloat16) {
    result.rowwise.data = result.columnwise.data = as_bfloat16(x, group_sizes, key);
  } else if (format.is_quantized() && !format.traits().has_group_columns) {
    if (rows) result = operand_of(quantize::call_quantize(x, key, group_sizes, {true, false}), format, key);
    result.columnwise = {};
    if (columns) {
      result.columnwise.data = marks_nonfinite(key) ? at::mul(x, nonfinite_factor(x, group_sizes)) : x;
    }
  } else if (columns_are_views(format, x)) {
    result = operand_of(quantize::call_quantize(x, key, group_sizes, {true, false}), format, key);
    result.columnwise = transposed_view_of(result.rowwise);
  } else if (rows || columns) {
    result = quantize_directions(x, group_sizes, format, key, rows, columns);
  }
  mark_nonfinite_scales(result, x, group_sizes, key);
  return result;
}

QuantizedGradient quantize_gradient(const Tensor& grad, const OptionalTensor& group_sizes,
                                    const Format& format, std::string_view key, bool rows, bool columns,
                                    bool with_bias) {
  if (!with_bias || !format.traits().has_fused_ops || format.is_nv()) {
    return {quantize_operand(grad, group_sizes, format, key, rows, columns), Tensor()};
  }
  const bool one = columns_are_views(format, grad);
  quantize::BiasBackwardQuantized quantized =
      quantize::call_bias_backward_quantize(grad, key, group_sizes, {rows || one, columns && !one});
  QuantizedOperand values = operand_of(std::move(quantized.values), format, key);
  if (one) values.columnwise = transposed_view_of(values.rowwise);
  mark_nonfinite_scales(values, grad, group_sizes, key);
  return {values, quantized.bias};
}

bool quantizes_weight_columnwise(const Tensor& weight, const OperandFormats& formats) {
  return !formats.symmetric_weight() ||
         (quantized_gemm_scales(formats.grad, formats.weight) && has_quantized_kernels(weight));
}

QuantizedWeight quantize_weight_operand(const Tensor& weight, const OperandFormats& formats, bool backward) {
  const bool both = backward && quantizes_weight_columnwise(weight, formats);
  if (formats.weight.family == FormatFamily::kBFloat16) {
    const Quantized rounded{as_bfloat16(weight, std::nullopt, formats.weight_key), Tensor(), Tensor()};
    return {rounded, backward ? rounded : Quantized{}};
  }
  QuantizedWeight result;
  QuantizedOperand rounded =
      quantize_directions(weight, std::nullopt, formats.weight, formats.weight_key, true, both);
  mark_nonfinite_scales(rounded, weight, std::nullopt, formats.weight_key);
  result = {std::move(rounded.rowwise), std::move(rounded.columnwise)};
  if (backward && !both) result.backward = result.forward;
  return result;
}

// The amaxes are written last, so that nothing is written if a buffer is refused.
void quantize_weight_operand_out(const Tensor& weight, const OperandFormats& formats,
                                 const QuantizedWeight& out) {
  const auto& [row, column] = out;
  if (formats.weight.family == FormatFamily::kBFloat16) {
    row.data.copy_(weight);
    if (marks_nonfinite(formats.weight_key)) row.data.mul_(nonfinite_factor(weight, std::nullopt));
    return;
  }
  const bool both = quantizes_weight_columnwise(weight, formats);
  const Nvfp4Inputs given =
      nvfp4_inputs(weight, std::nullopt, formats.weight, formats.weight_key, true, both);
  quantize::call_quantize_out(
      weight, formats.weight_key,
      {row.data, row.scale, both ? column.data : Tensor(), both ? column.scale : Tensor()},
      as_optional(given.amax), as_optional(given.amax_t), as_optional(given.seed));
  if (given.amax.defined()) row.amax.copy_(given.amax);
  if (given.amax_t.defined()) column.amax.copy_(given.amax_t);
  mark_nonfinite_scales({row, both ? column : Quantized{}}, weight, std::nullopt, formats.weight_key);
}

Tensor gemm_of(const Quantized& a, const Quantized& b, const OptionalTensor& group_sizes,
               const OptionalTensor& bias, const OptionalTensor& bias_scale, bool transpose_b,
               at::ScalarType dtype, const LaunchOptions& options) {
  const Scales a_scale(a), b_scale(b);
  const QuantizedKeys keys = keys_of(a, a_scale, b, b_scale);
  const OptionalTensor none;
  return group_sizes ? call_grouped_gemm(a.data, b.data, *group_sizes, bias, bias_scale, transpose_b, dtype,
                                         none, none, options, keys)
                     : call_gemm(a.data, b.data, bias, transpose_b, dtype, none, keys);
}

Tensor wgrad_of(const Quantized& grad, const Quantized& input, const OptionalTensor& group_sizes,
                at::ScalarType dtype, const LaunchOptions& options) {
  const OptionalTensor none;
  if (!grad.scale.defined()) {
    return group_sizes
               ? call_grouped_gemm_wgrad(grad.data, input.data, *group_sizes, dtype, none, none, options)
               : call_gemm(grad.data.t(), input.data.t(), none, true, dtype);
  }
  if (!group_sizes) return gemm_of(grad, input, none, none, none, true, dtype);
  const Scales grad_scale(grad), input_scale(input);
  return call_grouped_gemm_wgrad(grad.data, input.data, *group_sizes, dtype, none, none, options,
                                 keys_of(grad, grad_scale, input, input_scale));
}

}  // namespace transformer_plugin::linear
