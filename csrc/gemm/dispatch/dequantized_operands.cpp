#include "gemm/dispatch/dequantized_operands.h"

#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>

#include "common/tensor.h"
#include "quantize/ops/calls.h"
#include "quantize/ops/checks.h"
#include "quantize/ops/dequantize.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;

// On CUDA a scale per tensor that is not a power of two, and the amax of NVFP4, are applied to the sum, so that the elements are
// exact in bfloat16 and the GEMM runs on tensor cores.
bool scale_stays_outside(const QuantizedArgument& argument, const Format& format) {
  const bool per_tensor = format.family == FormatFamily::kFp8Tensor && !format.power_of_two_scales;
  return argument.data.is_cuda() && (per_tensor || (format.is_nv() && !format.row_scaled));
}

bool exact_in_bf16(const QuantizedArgument& argument, const Format& format) {
  return format.power_of_two_scales || scale_stays_outside(argument, format);
}

Tensor call_dequantize(const QuantizedArgument& argument, const Tensor* group_sizes, bool transposed,
                       at::ScalarType dtype) {
  const std::optional<Tensor> sizes = group_sizes ? std::optional<Tensor>(*group_sizes) : std::nullopt;
  return quantize::call_dequantize(argument.data, argument.scale, argument.key, dtype, sizes, transposed,
                                   argument.amax);
}

// The scale that the amax of NVFP4 means, for each group or matrix.
Tensor amax_factor(const QuantizedArgument& argument, const Format& format) {
  const float bound = format.four_over_six == FourOverSix::kNever ? 448.0f : 256.0f;
  return at::mul(*argument.amax, 1.0f / (bound * 6.0f));
}

}  // namespace

Format check_quantized(const QuantizedArgument& argument, int64_t dim, const Tensor* group_sizes,
                       bool transposed) {
  const Format format =
      quantize::quantized_format(argument.op, argument.format_name, argument.key, group_sizes == nullptr);
  const Argument data{argument.op, argument.name, argument.data};
  const Argument scale{argument.op, argument.scale_name, argument.scale};
  check_dtype(data, {quantize::element_dtype(format)});
  check_dim(data, dim);
  quantize::check_packing(data, format);
  if (transposed) quantize::check_aligned(data, format, group_sizes);
  const auto operand = quantize::shape_of_data(argument.data, format, transposed, group_sizes);
  quantize::check_scale(scale, data, format, operand.scale_sizes(format, transposed));
  if (format.is_nv()) {
    quantize::check_amax(data, {argument.amax_name, argument.amax, transposed, true}, argument.key,
                         operand.amax_sizes(format, transposed));
  } else {
    quantize::check_not_given(argument.op, argument.amax_name, argument.amax, argument.key);
  }
  return format;
}

c10::SymInt value_size(const QuantizedArgument& argument, const Format& format, int64_t dim) {
  const c10::SymInt size = argument.data.sym_size(dim);
  return dim + 1 == argument.data.dim() && format.packing() > 1 ? size * format.packing() : size;
}

void check_value_size(const QuantizedArgument& argument, const Format& format, int64_t dim,
                      const c10::SymInt& expected, const char* meaning) {
  const bool packed = dim + 1 == argument.data.dim() && format.packing() > 1;
  TP_CHECK_VALUE(value_size(argument, format, dim) == expected, argument.op, argument.name,
                 "size " << (packed ? expected / format.packing() : expected) << " in dimension " << dim
                         << " (" << meaning << ")",
                 describe(argument.data), "Pass tensors whose sizes agree");
}

at::ScalarType dequantized_dtype(const QuantizedArgument& a, const Format& a_format,
                                 const QuantizedArgument& b, const Format& b_format) {
  return exact_in_bf16(a, a_format) && exact_in_bf16(b, b_format) ? at::kBFloat16 : at::kFloat;
}

Values dequantized_operand(const QuantizedArgument& argument, const Format& format, const Tensor* group_sizes,
                           bool transposed, at::ScalarType dtype) {
  if (dtype != at::kBFloat16 || !scale_stays_outside(argument, format)) {
    return {call_dequantize(argument, group_sizes, transposed, dtype), std::nullopt};
  }
  if (format.is_nv()) {
    return {quantize::dequantize_without_amax(argument.data, argument.scale, group_sizes, format, dtype,
                                              transposed),
            amax_factor(argument, format)};
  }
  if (transposed && group_sizes &&
      format.aligned_groups) {  // the data is aligned, so its columns are not those of the values
    const Tensor ones = at::ones_like(argument.scale);
    const QuantizedArgument unscaled{
        argument.op,   argument.name, argument.scale_name, argument.amax_name, argument.format_name,
        argument.data, ones,          argument.amax,       argument.key};
    return {call_dequantize(unscaled, group_sizes, transposed, dtype), argument.scale};
  }
  const Tensor codes = argument.data.to(dtype);
  return {transposed ? codes.transpose(-2, -1) : codes, argument.scale};
}

QuantizedStack quantized_stack(const QuantizedArgument& argument, const Format& format,
                               at::ScalarType dtype) {
  return {argument.data.size(1), value_size(argument, format, 2).expect_int(), dtype,
          [&argument, format](int64_t group, const Tensor& values) {
            quantize::dequantize_matrix(argument.data, argument.scale, argument.amax, format, group, values);
          }};
}

std::optional<Tensor> combined_factor(const Values& a, const Values& b) {
  if (a.factor && b.factor) return at::mul(*a.factor, *b.factor);
  return a.factor ? a.factor : b.factor;
}

std::optional<Tensor> scaled_by(const std::optional<Tensor>& alpha, const std::optional<Tensor>& factor) {
  if (alpha && factor) return at::mul(*factor, *alpha);
  return alpha ? alpha : factor;
}

std::optional<Tensor> alpha_and_amaxes(const std::optional<Tensor>& alpha, const QuantizedArgument& a,
                                       const Format& a_format, const QuantizedArgument& b,
                                       const Format& b_format) {
  if (!a_format.is_nv()) return alpha;
  return scaled_by(alpha, at::mul(amax_factor(a, a_format), amax_factor(b, b_format)));
}

}  // namespace transformer_plugin::gemm
