#include "linear/operands.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/where.h>

#include <limits>

#include "common/autograd.h"
#include "gemm/dispatch/select.h"
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
                                     std::string_view key, bool rows, bool columns, bool zero_tail = true) {
  const Nvfp4Inputs given = nvfp4_inputs(x, group_sizes, format, key, rows, columns);
  QuantizedOperand result = operand_of(
      quantize::call_quantize(x, key, group_sizes, {rows, columns}, as_optional(given.amax),
                              as_optional(given.amax_t), as_optional(given.seed), std::nullopt, zero_tail),
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

// A stack of tensors of one size. Copies bytes, because torch cannot copy E2M1.
Tensor stack_of(const std::vector<Tensor>& tensors) {
  if (!tensors[0].defined()) return {};
  const at::ScalarType dtype = tensors[0].scalar_type();
  std::vector<Tensor> parts;
  parts.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    parts.push_back((tensor.element_size() == 1 ? tensor.view(at::kByte) : tensor).unsqueeze(0));
  }
  return at::cat(parts).view(dtype);
}

// Matrices in a format that no op quantizes as a list: one by one, and their quantized data is copied into a stack.
QuantizedOperand quantize_one_by_one(at::TensorList matrices, const Format& format, std::string_view key,
                                     bool columns) {
  std::vector<QuantizedOperand> each;
  each.reserve(matrices.size());
  for (const Tensor& matrix : matrices) {
    each.push_back(quantize_directions(matrix, std::nullopt, format, key, true, columns));
  }
  const auto stack = [&](Quantized QuantizedOperand::*direction, Tensor Quantized::*part) {
    std::vector<Tensor> parts;
    parts.reserve(each.size());
    for (const QuantizedOperand& one : each) parts.push_back(one.*direction.*part);
    const Tensor joined = stack_of(parts);
    const bool one_number = part == &Quantized::amax && !format.row_scaled;
    return joined.defined() && one_number ? joined.squeeze(1) : joined;
  };
  const auto direction = [&](Quantized QuantizedOperand::*own, bool transposed) {
    return Quantized{stack(own, &Quantized::data),
                     stack(own, &Quantized::scale),
                     stack(own, &Quantized::amax),
                     format,
                     key,
                     transposed};
  };
  return {direction(&QuantizedOperand::rowwise, false), direction(&QuantizedOperand::columnwise, true)};
}

// The bytes of quantizing the stack of the matrices, which is not made.
QuantizedOperand quantize_matrices(at::TensorList matrices, const Format& format, std::string_view key,
                                   bool columns) {
  if (format.row_scaled || format.stochastic_rounding)
    return quantize_one_by_one(matrices, format, key, columns);
  Tensor amax, amax_t;
  if (format.is_nv()) {
    const auto count = static_cast<int64_t>(matrices.size());
    const auto options = matrices[0].options().dtype(at::kFloat);  // by the dispatcher, for a tracer
    amax = at::empty({count}, options);
    if (columns) amax_t = at::empty({count}, options);
    quantize::call_amax_list_out(matrices, key, amax, as_optional(amax_t));
  }
  QuantizedOperand result = operand_of(
      quantize::call_quantize_stack(matrices, key, {true, columns}, as_optional(amax)), format, key);
  result.rowwise.amax = amax;
  result.columnwise.amax = amax_t;
  return result;
}

// Makes the scales NaN if the key has the option `nan` and `x` is not finite.
void mark_nonfinite_scales(const QuantizedOperand& rounded, const Tensor& x,
                           const OptionalTensor& group_sizes, std::string_view key) {
  if (!marks_nonfinite(key)) return;
  const Tensor mark = nonfinite_factor(x, group_sizes);
  mark_nonfinite_scales(rounded.rowwise, mark);
  mark_nonfinite_scales(rounded.columnwise, mark);
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
                                  std::string_view key, bool rows, bool columns, bool zero_tail) {
  const auto quantize_rows = [&] {
    return operand_of(quantize::call_quantize(x, key, group_sizes, {true, false}, std::nullopt, std::nullopt,
                                              std::nullopt, std::nullopt, zero_tail),
                      format, key);
  };
  QuantizedOperand result;
  if (format.family == FormatFamily::kNone) return {{x, Tensor(), Tensor()}, {x, Tensor(), Tensor()}};
  if (format.family == FormatFamily::kBFloat16) {
    result.rowwise.data = result.columnwise.data = as_bfloat16(x, group_sizes, key);
  } else if (format.is_quantized() && !format.traits().has_group_columns) {
    if (rows) result = quantize_rows();
    result.columnwise = {};
    if (columns) {
      result.columnwise.data = marks_nonfinite(key) ? at::mul(x, nonfinite_factor(x, group_sizes)) : x;
    }
  } else if (columns_are_views(format, x)) {
    result = quantize_rows();
    result.columnwise = transposed_view_of(result.rowwise);
  } else if (rows || columns) {
    result = quantize_directions(x, group_sizes, format, key, rows, columns, zero_tail);
  }
  mark_nonfinite_scales(result, x, group_sizes, key);
  return result;
}

OptionalTensor column_groups(const Tensor& input, const OptionalTensor& group_sizes,
                             const OperandFormats& formats, int64_t ranks) {
  const bool blocks = formats.input.family == FormatFamily::kFp8Block && !formats.input.square_blocks &&
                      !formats.grad.square_blocks;
  if (group_sizes || !blocks || !input.sym_size(0).is_symbolic()) return group_sizes;
  return at::full_symint({1}, c10::Scalar(input.sym_size(0) * ranks), input.options().dtype(at::kLong));
}

QuantizedGradient quantize_gradient(const Tensor& grad, const OptionalTensor& group_sizes,
                                    const Format& format, std::string_view key, bool rows, bool columns,
                                    bool with_bias, bool zero_tail) {
  if (!with_bias || !format.traits().has_fused_ops || format.is_nv()) {
    return {quantize_operand(grad, group_sizes, format, key, rows, columns, zero_tail), Tensor()};
  }
  const bool one = columns_are_views(format, grad);
  quantize::BiasBackwardQuantized quantized = quantize::call_bias_backward_quantize(
      grad, key, group_sizes, {rows || one, columns && !one}, zero_tail);
  QuantizedOperand values = operand_of(std::move(quantized.values), format, key);
  if (one) values.columnwise = transposed_view_of(values.rowwise);
  mark_nonfinite_scales(values, grad, group_sizes, key);
  return {values, quantized.bias};
}

bool quantizes_weight_columnwise(const Tensor& weight, const OperandFormats& formats) {
  return !formats.symmetric_weight() ||
         (operand_scaling(GemmDirection::kFprop, formats.grad, formats.weight) &&
          has_quantized_kernels(weight));
}

namespace {

// Values without scales: unchanged, or rounded to bfloat16.
QuantizedWeight unscaled_weight(at::TensorList weight, const OperandFormats& formats, bool backward) {
  const std::string_view key = formats.weight_key;
  const bool rounds = !formats.unquantized(), marks = rounds && marks_nonfinite(key);
  std::vector<Tensor> values = weight.vec();
  if (rounds && weight.size() == 1) {
    values[0] = as_bfloat16(weight[0], std::nullopt, key);
  } else if (rounds) {
    const Tensor factor = marks ? nonfinite_factor(weight) : Tensor();
    for (Tensor& matrix : values) {
      if (matrix.scalar_type() != at::kBFloat16) matrix = matrix.to(at::kBFloat16);
      if (marks) matrix = at::mul(matrix, factor);
    }
  }
  const Quantized first{values[0], Tensor(), Tensor()};
  return {first, backward ? first : Quantized{},
          weight.size() > 1 ? std::move(values) : std::vector<Tensor>{}};
}

}  // namespace

QuantizedWeight quantize_weight_operand(at::TensorList weight, const OperandFormats& formats, bool backward) {
  if (!formats.weight.is_quantized()) return unscaled_weight(weight, formats, backward);
  const bool both = backward && quantizes_weight_columnwise(weight[0], formats);
  QuantizedWeight result;
  QuantizedOperand rounded =
      weight.size() > 1
          ? quantize_matrices(weight, formats.weight, formats.weight_key, both)
          : quantize_directions(weight[0], std::nullopt, formats.weight, formats.weight_key, true, both);
  if (marks_nonfinite(formats.weight_key)) {
    const Tensor mark = nonfinite_factor(weight);
    mark_nonfinite_scales(rounded.rowwise, mark);
    mark_nonfinite_scales(rounded.columnwise, mark);
  }
  result = {std::move(rounded.rowwise), std::move(rounded.columnwise)};
  if (backward && !both) result.backward = result.forward;
  return result;
}

void copy_weight(at::TensorList weight, const Tensor& out) {
  Tensor whole = out;
  if (weight.size() == 1) whole.copy_(weight[0]);
  if (weight.size() == 1) return;
  for (size_t g = 0; g < weight.size(); ++g) whole.select(0, static_cast<int64_t>(g)).copy_(weight[g]);
}

namespace {

// target = source; with noop = 1 on the device every byte of the target stays.
void copy_unless(const OptionalTensor& noop, const Tensor& source, const Tensor& target) {
  if (!source.defined()) return;
  // torch cannot copy E2M1.
  const bool bytes = target.element_size() == 1;
  const Tensor to = bytes ? target.view(at::kByte) : target, from = bytes ? source.view(at::kByte) : source;
  to.copy_(noop ? at::where(noop->eq(1), to, from) : from);
}

void copy_unless(const OptionalTensor& noop, const Quantized& source, const Quantized& target) {
  copy_unless(noop, source.data, target.data);
  copy_unless(noop, source.scale, target.scale);
  copy_unless(noop, source.amax, target.amax);
}

// What marks values as not finite; 1 with noop = 1.
Tensor factor_unless(const OptionalTensor& noop, at::TensorList weight) {
  const Tensor factor = nonfinite_factor(weight);
  return noop ? at::where(noop->eq(1).squeeze(0), at::full({}, 1.0, factor.options()), factor) : factor;
}

void bfloat16_weight_out(at::TensorList weight, std::string_view key, const Tensor& out,
                         const OptionalTensor& noop) {
  if (noop) {
    for (size_t g = 0; g < weight.size(); ++g) {
      const Tensor part = weight.size() == 1 ? out : out.select(0, static_cast<int64_t>(g));
      copy_unless(noop, weight[g].to(at::kBFloat16), part);
    }
  } else {
    copy_weight(weight, out);
  }
  if (marks_nonfinite(key)) Tensor(out).mul_(factor_unless(noop, weight));
}

}  // namespace

// The amaxes are written last, so that nothing is written if a buffer is refused.
void quantize_weight_operand_out(at::TensorList list, const OperandFormats& formats,
                                 const QuantizedWeight& out, const OptionalTensor& noop) {
  const Quantized &row = out.forward, &column = out.backward;
  if (formats.weight.family == FormatFamily::kBFloat16) {
    return bfloat16_weight_out(list, formats.weight_key, row.data, noop);
  }
  const bool both = column.transposed, marks = marks_nonfinite(formats.weight_key);
  if (list.size() > 1) {
    const QuantizedOperand made = quantize_matrices(list, formats.weight, formats.weight_key, both);
    if (marks) {
      const Tensor mark = nonfinite_factor(list);
      mark_nonfinite_scales(made.rowwise, mark);
      mark_nonfinite_scales(made.columnwise, mark);
    }
    copy_unless(noop, made.rowwise, row);
    if (both) copy_unless(noop, made.columnwise, column);
    return;
  }
  const Tensor& weight = list[0];
  const Nvfp4Inputs given =
      nvfp4_inputs(weight, std::nullopt, formats.weight, formats.weight_key, true, both);
  quantize::call_quantize_out(
      weight, formats.weight_key,
      {row.data, row.scale, both ? column.data : Tensor(), both ? column.scale : Tensor()},
      as_optional(given.amax), as_optional(given.amax_t), as_optional(given.seed), noop);
  copy_unless(noop, given.amax, row.amax);
  copy_unless(noop, given.amax_t, column.amax);
  if (!marks) return;
  const Tensor mark = factor_unless(noop, list);
  mark_nonfinite_scales(row, mark);
  if (both) mark_nonfinite_scales(column, mark);
}

}  // namespace transformer_plugin::linear
