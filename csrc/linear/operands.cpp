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

// With one scale per tensor the columnwise operand can be a transposed view of the rowwise one; not for the FP8 kernels, which
// need K-major data.
bool columns_are_views(const Format& format, const Tensor& like) {
  return !format.has_blocks() && !has_quantized_kernels(like);
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
                                         as_optional(given.amax_t), as_optional(given.seed)));
  result.rowwise.amax = given.amax;
  result.columnwise.amax = given.amax_t;
  return result;
}

// In place. bf16 has no scale.
void mark_nonfinite_scales(const QuantizedTensor& values, const Tensor& mark) {
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
  explicit Scales(const QuantizedTensor& values)
      : tensors_{values.scale, values.amax}, count_(values.amax.defined() ? 2 : values.scale.defined()) {}
  at::TensorList get() const { return {tensors_, count_}; }

 private:
  const Tensor tensors_[2];
  const size_t count_;
};

// Unquantized values, in bfloat16, have no format for the GEMM ops.
QuantizedKeys keys_of(const GemmOperand& a, const Scales& a_scale, const GemmOperand& b,
                      const Scales& b_scale) {
  if (a_scale.get().empty()) return {};
  return {a_scale.get(), b_scale.get(), a.key, b.key};
}

}  // namespace

QuantizedOperand operand_of(quantize::Outputs&& outputs) {
  return {{std::move(outputs.data), std::move(outputs.scale), Tensor()},
          {std::move(outputs.data_t), std::move(outputs.scale_t), Tensor()}};
}

// Not by a .to() that changes nothing: an op below autograd must not return its argument.
Tensor as_bfloat16(const Tensor& x, const OptionalTensor& group_sizes, std::string_view key) {
  const Tensor rounded = x.scalar_type() == at::kBFloat16 ? x : x.to(at::kBFloat16);
  return marks_nonfinite(key) ? at::mul(rounded, nonfinite_factor(x, group_sizes)) : rounded;
}

std::string layer_format_key(std::string_view key, const Tensor& like, const OptionalTensor& group_sizes) {
  std::string result(key);
  if (!group_sizes || !has_quantized_kernels(like)) return result;
  const Format format = parse_format("grouped_linear", "format", key);
  const bool fp8 = format.family == FormatFamily::kFp8Tensor || format.family == FormatFamily::kFp8Block;
  if (!fp8 || format.aligned_groups) return result;
  return result + (key.find(':') == std::string_view::npos ? ":aligned" : ",aligned");
}

QuantizedOperand quantize_operand(const Tensor& x, const OptionalTensor& group_sizes, const Format& format,
                                  std::string_view key, bool rows, bool columns) {
  QuantizedOperand result;
  if (format.family == FormatFamily::kBFloat16) {
    result.rowwise.data = as_bfloat16(x, group_sizes, key);
    result.columnwise.data = result.rowwise.data.t();
  } else if (columns_are_views(format, x)) {
    result = operand_of(quantize::call_quantize(x, key, group_sizes, {true, false}));
    result.columnwise = {result.rowwise.data.t(), result.rowwise.scale, Tensor()};
  } else if (rows || columns) {
    result = quantize_directions(x, group_sizes, format, key, rows, columns);
  }
  mark_nonfinite_scales(result, x, group_sizes, key);
  return result;
}

QuantizedGradient quantize_gradient(const Tensor& grad, const OptionalTensor& group_sizes,
                                    const Format& format, std::string_view key, bool rows, bool columns,
                                    bool with_bias) {
  if (!with_bias || !format.is_quantized() || format.is_nv()) {
    return {quantize_operand(grad, group_sizes, format, key, rows, columns), Tensor()};
  }
  const bool one = columns_are_views(format, grad);
  quantize::BiasBackwardQuantized quantized =
      quantize::call_bias_backward_quantize(grad, group_sizes, key, {rows || one, columns && !one});
  QuantizedOperand values = operand_of(std::move(quantized.values));
  if (one) values.columnwise = {values.rowwise.data.t(), values.rowwise.scale, Tensor()};
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
    const QuantizedTensor rounded{as_bfloat16(weight, std::nullopt, formats.weight_key), Tensor(), Tensor()};
    return {rounded, backward ? rounded : QuantizedTensor{}};
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
  mark_nonfinite_scales({row, both ? column : QuantizedTensor{}}, weight, std::nullopt, formats.weight_key);
}

Tensor gemm_of(const GemmOperand& a, const GemmOperand& b, const OptionalTensor& group_sizes,
               const OptionalTensor& bias, const OptionalTensor& bias_scale, bool transpose_b,
               at::ScalarType dtype) {
  const Scales a_scale(a.values), b_scale(b.values);
  const QuantizedKeys keys = keys_of(a, a_scale, b, b_scale);
  const OptionalTensor none;
  return group_sizes ? call_grouped_gemm(a.values.data, b.values.data, *group_sizes, bias, bias_scale,
                                         transpose_b, dtype, none, none, {}, keys)
                     : call_gemm(a.values.data, b.values.data, bias, transpose_b, dtype, none, keys);
}

Tensor wgrad_of(const GemmOperand& grad, const GemmOperand& input, const OptionalTensor& group_sizes,
                at::ScalarType dtype) {
  if (!group_sizes) return gemm_of(grad, input, std::nullopt, std::nullopt, std::nullopt, true, dtype);
  const QuantizedTensor &g = grad.values, &x = input.values;
  if (!g.scale.defined()) return call_grouped_gemm_wgrad(g.data.t(), x.data.t(), *group_sizes, dtype);
  const Scales grad_scale(g), input_scale(x);
  const OptionalTensor none;
  return call_grouped_gemm_wgrad(g.data, x.data, *group_sizes, dtype, none, none, {},
                                 keys_of(grad, grad_scale, input, input_scale));
}

}  // namespace transformer_plugin::gemm
