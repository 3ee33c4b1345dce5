#include "gemm/dispatch/quantized_operands.h"

#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>

#include "common/autograd.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "quantize/ops/calls.h"
#include "quantize/ops/checks.h"
#include "quantize/ops/dequantize.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// On CUDA a scale per tensor that is not a power of two, and the amax of NVFP4, are applied to the sum, so
// that the elements are exact in bfloat16 and the GEMM runs on tensor cores.
bool scale_stays_outside(const Quantized& operand) {
  const Format& format = operand.format;
  const bool per_tensor = format.family == FormatFamily::kFp8Tensor && !format.power_of_two_scales;
  return operand.data.is_cuda() && (per_tensor || (format.is_nv() && !format.row_scaled));
}

bool exact_in_bf16(const Quantized& operand) {
  return operand.format.power_of_two_scales || scale_stays_outside(operand);
}

Tensor call_dequantize(const Quantized& operand, const Tensor& scale, const Tensor* group_sizes,
                       at::ScalarType dtype) {
  const OptionalTensor sizes = group_sizes ? OptionalTensor(*group_sizes) : std::nullopt;
  return quantize::call_dequantize(operand.data, scale, operand.key, dtype, sizes, operand.transposed,
                                   as_optional(operand.amax), /*zero_tail=*/false);
}

// The scale that the amax of NVFP4 means, for each group or matrix.
Tensor amax_factor(const Quantized& operand) {
  const float bound = operand.format.four_over_six == FourOverSix::kNever ? 448.0f : 256.0f;
  return at::mul(operand.amax, 1.0f / (bound * 6.0f));
}

OptionalTensor product_of(const OptionalTensor& x, const OptionalTensor& y) {
  if (x && y) return at::mul(*x, *y);
  return x ? x : y;
}

// The dequantized operand, rows first also if it was transposed, in no format. Its scale is the factor that
// is applied to the sum instead of to the elements, float32, one for each group or matrix; undefined if there
// is none.
Quantized dequantized_operand(const Quantized& operand, const Tensor* group_sizes, at::ScalarType dtype) {
  const Format& format = operand.format;
  if (dtype != at::kBFloat16 || !scale_stays_outside(operand)) {
    return {call_dequantize(operand, operand.scale, group_sizes, dtype), {}, {}};
  }
  if (format.is_nv()) {
    return {quantize::dequantize_without_amax(operand.data, operand.scale, group_sizes, format, dtype,
                                              operand.transposed),
            amax_factor(operand),
            {}};
  }
  if (operand.transposed && group_sizes &&
      format.aligned_groups) {  // the data is aligned, so its columns are not those of the values
    return {call_dequantize(operand, at::ones_like(operand.scale), group_sizes, dtype), operand.scale, {}};
  }
  const Tensor values = operand.data.to(dtype);
  return {operand.transposed ? values.transpose(-2, -1) : values, operand.scale, {}};
}

}  // namespace

void check_plain(const char* op, OptionalList a_scale, OptionalList b_scale, const char* a_name,
                 const char* b_name) {
  const auto check = [&](const char* name, OptionalList scales) {
    TP_CHECK_VALUE(!scales || scales->empty(), op, name, "no tensors for format 'none'",
                   scales->size() << " of them", "Name the format that the operand was quantized to");
  };
  check(a_name, a_scale);
  check(b_name, b_scale);
}

Format checked_format(const OperandNames& names, std::string_view key, at::TensorList scales, size_t matrices,
                      bool allow_square) {
  const Format format = quantize::quantized_format(names.op, names.format, key, allow_square);
  const size_t count = format.is_nv() ? 2 * matrices : matrices;
  const auto wanted = [&] {
    const bool one = matrices == 1;
    std::ostringstream text;
    text << (one ? "scale_inv" : "scale_inv of each matrix");
    if (format.is_nv()) text << (one ? " and amax" : ", then amax of each matrix");
    text << ", " << count << (count == 1 ? " tensor" : " tensors");
    return text.str();
  };
  TP_CHECK_VALUE(scales.size() == count, names.op, names.scales, wanted() << " for '" << key << "'",
                 scales.size(), "Pass what the operand was quantized to");
  return format;
}

void check_quantized(const OperandNames& names, const Quantized& operand, int64_t dim,
                     const Tensor* group_sizes) {
  const Format& format = operand.format;
  const Argument data{names.op, names.data, operand.data}, scale{names.op, names.scale, operand.scale};
  check_dtype(data, {quantize::element_dtype(format)});
  check_dim(data, dim);
  quantize::check_packing(data, format);
  if (operand.transposed) quantize::check_aligned(data, format, group_sizes);
  const auto shape = quantize::shape_of_data(operand.data, format, operand.transposed, group_sizes);
  quantize::check_scale(scale, data, format, shape.scale_sizes(format, operand.transposed));
  if (!format.is_nv()) return;
  const OptionalTensor amax = as_optional(operand.amax);
  quantize::check_amax(data, {names.amax, amax, operand.transposed, true}, operand.key,
                       shape.amax_sizes(format, operand.transposed));
}

Quantized parsed_operand(const OperandNames& names, const OperandArguments& operand, bool allow_square,
                         bool transposed) {
  const at::TensorList scales = list_or_none(operand.scales);
  const Format format = checked_format(names, operand.key, scales, 1, allow_square);
  return {operand.data,
          quantize::typed_scale(scales[0], format),
          format.is_nv() ? scales[1] : Tensor(),
          format,
          operand.key,
          transposed};
}

Quantized checked_operand(const OperandNames& names, const OperandArguments& operand, int64_t dim,
                          const Tensor* group_sizes, bool transposed) {
  Quantized result = parsed_operand(names, operand, group_sizes == nullptr, transposed);
  check_quantized(names, result, dim, group_sizes);
  return result;
}

// All matrices must be like the first. A name for the error is made only for one that is not.
Quantized checked_list(const OperandNames& names, at::TensorList list, at::TensorList scales,
                       std::string_view key) {
  const Format format = checked_format(names, key, scales, list.size(), true);
  const at::TensorList amaxes = scales.slice(list.size());
  const auto matrix = [&](size_t i) {
    return Quantized{list[i], scales[i], amaxes.empty() ? Tensor() : amaxes[i], format, key};
  };
  const auto check = [&](size_t i) {
    const std::string data = entry("b", i), scale = entry("b_scale", i),
                      amax = entry("b_scale", list.size() + i);
    check_quantized({names.op, data.c_str(), names.scales, scale.c_str(), amax.c_str(), names.format},
                    matrix(i), 2, nullptr);
  };
  check(0);
  for (size_t i = 1; i < list.size(); ++i) {
    if (is_alike(scales[i], scales[0]) && (amaxes.empty() || is_alike(amaxes[i], amaxes[0]))) continue;
    check(i);
  }
  return matrix(0);
}

void check_formats(const OperandNames& a_names, const Quantized& a, const OperandNames& b_names,
                   const Quantized& b, bool transpose_b) {
  const bool rows = a.format.traits().has_row_scales;
  if (!rows && !b.format.traits().has_row_scales) return;
  const std::string_view family = (rows ? a : b).format.traits().name;
  TP_CHECK_VALUE(rows == b.format.traits().has_row_scales && b.format.element == DType::kFloat8E4M3,
                 b_names.op, b_names.format,
                 (rows ? "" : "another family than ") << family << (rows ? " with e4m3" : "") << ", because "
                                                      << a_names.format << " is '" << a.key << "'",
                 "'" << b.key << "'", "Quantize both operands to " << family << ", the second one to e4m3");
  TP_CHECK_VALUE(transpose_b, b_names.op, "transpose_b",
                 "True with " << a.format.traits().name << ", whose scales are those of rows of 'b'", "False",
                 "Pass the transposed matrix, quantized along its rows");
}

void check_wgrad_formats(const OperandNames& grad_names, const Quantized& grad,
                         const OperandNames& input_names, const Quantized& input) {
  const auto check_columns = [](const OperandNames& names, const Quantized& operand) {
    TP_CHECK_VALUE(operand.format.traits().has_group_columns, names.op, names.format,
                   "a format with scales along the rows that are summed over, not one for each of them",
                   "'" << operand.key << "'", "Pass the operands in bfloat16, without a format");
  };
  check_columns(grad_names, grad);
  check_columns(input_names, input);
  const auto check_option = [&](const char* option, bool of_grad, bool of_input) {
    TP_CHECK_VALUE(
        of_grad == of_input, input_names.op, input_names.format,
        "'" << option << "' if and only if " << grad_names.format << ", '" << grad.key << "', has it",
        "'" << input.key << "'", "Quantize both operands with it or both without");
  };
  check_option("aligned", grad.format.aligned_groups, input.format.aligned_groups);
  // The transform of one operand cancels only against that of the other.
  check_option("rht", grad.format.random_hadamard, input.format.random_hadamard);
}

WgradOperands checked_wgrad_operands(const char* op, const OperandArguments& grad,
                                     const OperandArguments& input, const Tensor& group_sizes) {
  const OperandNames grad_names = names_of_grad(op), input_names = names_of_input(op);
  const Argument grad_argument{op, "grad", grad.data}, input_argument{op, "input", input.data};
  check_dim(grad_argument, 2);
  check_dim(input_argument, 2);
  check_group_sizes({op, "group_sizes", group_sizes}, grad_argument);
  WgradOperands operands{parsed_operand(grad_names, grad, false, true),
                         parsed_operand(input_names, input, false, true)};
  check_wgrad_formats(grad_names, operands.grad, input_names, operands.input);
  check_quantized(grad_names, operands.grad, 2, &group_sizes);
  check_quantized(input_names, operands.input, 2, &group_sizes);
  check_same_device(input_argument, grad_argument);
  check_value_size(input_names, operands.input, 1, operands.grad.row_length(),
                   "the columns of 'grad', the rows of the buffer");
  return operands;
}

void check_value_size(const OperandNames& names, const Quantized& operand, int64_t dim,
                      const c10::SymInt& expected, const char* meaning) {
  const int64_t packing = dim + 1 == operand.data.dim() ? operand.format.packing() : 1;
  const c10::SymInt size = operand.data.sym_size(dim);
  TP_CHECK_VALUE((packing > 1 ? size * packing : size) == expected, names.op, names.data,
                 "size " << (packing > 1 ? expected / packing : expected) << " in dimension " << dim << " ("
                         << meaning << ")",
                 describe(operand.data), "Pass tensors whose sizes agree");
}

at::ScalarType quantized_output_dtype(const char* op, std::optional<at::ScalarType> dtype) {
  if (!dtype) return at::kBFloat16;
  check_rounded_dtype(op, *dtype);
  return *dtype;
}

OptionalTensor alpha_and_amaxes(const GemmProblem& problem) {
  const Quantized &a = problem.a, &b = problem.b;
  if (!a.format.is_nv()) return problem.alpha;
  return product_of(at::mul(amax_factor(a), amax_factor(b)), problem.alpha);
}

OptionalTensor beta_or_one(const GemmProblem& problem, const Tensor& like) {
  if (!problem.accumulate) return problem.beta;
  return at::ones({1}, like.options().dtype(at::kFloat));
}

GemmProblem dequantized(const GemmProblem& problem, bool both) {
  const bool exact = exact_in_bf16(problem.a) && exact_in_bf16(problem.b);
  const at::ScalarType dtype = exact ? at::kBFloat16 : at::kFloat;
  const Tensor* sizes = problem.is_dense() ? nullptr : &problem.group_sizes;
  GemmProblem result = problem;
  result.a = dequantized_operand(problem.a, sizes, dtype);
  if (both) result.b = dequantized_operand(problem.b, problem.is_wgrad() ? sizes : nullptr, dtype);
  const OptionalTensor b_factor = both ? as_optional(result.b.scale) : std::nullopt;
  result.alpha = product_of(product_of(as_optional(result.a.scale), b_factor), problem.alpha);
  result.a.scale = Tensor();
  if (both) result.b.scale = Tensor();
  return result;
}

}  // namespace transformer_plugin::gemm
