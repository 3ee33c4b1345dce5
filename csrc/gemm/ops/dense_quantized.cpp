#include "gemm/ops/dense_quantized.h"

#include <ATen/ops/ones.h>

#include "common/autograd.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/quantized_gemm.h"
#include "gemm/dispatch/rowwise_gemm.h"
#include "gemm/generic/dense_gemm.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Checked operands.
struct Operands {
  Quantized a, b;
  const OptionalTensor &bias, &alpha;
  bool transpose_b;

  c10::SymInt rows() const { return a.rows(); }
  c10::SymInt columns() const { return transpose_b ? b.rows() : b.columns(); }
};

Operands checked(const QuantizedCall& call) {
  const OperandNames a_names = names_of_a(call.op), b_names = names_of_b(call.op);
  const Argument a{call.op, "a", call.a.data};
  Operands operands{
      checked_operand(a_names, call.a, 2, nullptr, false), {}, call.bias, call.alpha, call.transpose_b};
  check_same_device({call.op, "b", call.b.data}, a);
  operands.b = checked_operand(b_names, call.b, 2, nullptr, false);
  check_formats(a_names, operands.a, b_names, operands.b, call.transpose_b);
  check_value_size(b_names, operands.b, call.transpose_b ? 1 : 0, operands.a.columns(),
                   "the columns of 'a', summed over");
  if (call.bias) check_bias({call.op, "bias", *call.bias}, a, std::nullopt, operands.columns());
  if (call.bias) check_no_gradient({call.op, "bias", *call.bias}, kNoQuantizedGradient);
  if (call.alpha) check_factor({call.op, "alpha", *call.alpha}, a, 1);
  return operands;
}

Operands checked_out(const QuantizedCall& call, const OptionalTensor& beta, const Tensor& out) {
  Operands operands = checked(call);
  const Argument a{call.op, "a", call.a.data};
  check_result({call.op, "out", out}, a, operands.rows(), operands.columns());
  if (beta) check_factor({call.op, "beta", *beta}, a, 1);
  return operands;
}

// Whether a kernel that reads the quantized data may run.
bool has_kernel(const Operands& operands) {
  const Format &a = operands.a.format, &b = operands.b.format;
  if (!operands.transpose_b || !has_quantized_kernels(operands.a.data)) return false;
  return quantized_gemm_scales(a, b) || (quantized_wgrad_scales(a, b) && !operands.bias);
}

// `beta`, or the 1 of `accumulate` for kernels that know no such flag.
OptionalTensor beta_or_one(const OptionalTensor& beta, bool accumulate, const Tensor& like) {
  return accumulate ? OptionalTensor(at::ones({1}, like.options().dtype(at::kFloat))) : beta;
}

// Runs it: as one group of rows, or of columns, which has no bias. Returns whether it supported the problem.
bool run_kernel(const Operands& operands, const OptionalTensor& beta, const Tensor& out, bool accumulate) {
  const auto& [a, b, bias, alpha, transpose_b] = operands;
  const OptionalTensor none;
  const OptionalTensor factor = alpha_and_amaxes(alpha, a, b);
  const auto rows = quantized_gemm_scales(a.format, b.format);
  if (rows) {
    const OptionalTensor factor_of_out = beta_or_one(beta, accumulate, out);
    if (run_quantized_gemm_out({*rows, a, b, none, bias, none, factor, factor_of_out}, out)) return true;
  }
  const auto columns = quantized_wgrad_scales(a.format, b.format);
  return columns && !bias && run_quantized_wgrad_out({*columns, a, b, none, factor, beta}, out, accumulate);
}

// Calls multiply(a, b, alpha) with the dequantized operands.
template <typename Multiply>
auto with_values(const Operands& operands, Multiply&& multiply) {
  const at::ScalarType exact = dequantized_dtype(operands.a, operands.b);
  const Quantized a = dequantized_operand(operands.a, nullptr, exact);
  const Quantized b = dequantized_operand(operands.b, nullptr, exact);
  return multiply(a.data, operands.transpose_b ? transposed_view(b.data) : b.data,
                  alpha_and_factors(operands.alpha, a, b));
}

}  // namespace

Tensor quantized_product_meta(const QuantizedCall& call, std::optional<at::ScalarType> dtype) {
  const Operands operands = checked(call);
  const at::ScalarType to = quantized_output_dtype(call.op, dtype);
  return empty(call.a.data, {operands.rows(), operands.columns()}, to);
}

Tensor quantized_product(const QuantizedCall& call, std::optional<at::ScalarType> dtype) {
  const Operands operands = checked(call);
  const at::ScalarType to = quantized_output_dtype(call.op, dtype);
  const BelowAutograd guard;
  const OptionalTensor none;
  if (has_kernel(operands)) {
    const Tensor out = empty(call.a.data, {operands.rows(), operands.columns()}, to);
    if (run_kernel(operands, none, out, false)) return out;
  }
  if (operands.a.format.traits().has_row_scales) {
    return rowwise_product({operands.a, operands.b, none, call.bias, none, call.alpha}, to);
  }
  return with_values(operands, [&](const Tensor& a, const Tensor& b, const OptionalTensor& alpha) {
    return dense_gemm(a, b, call.bias, to, alpha);
  });
}

void quantized_product_out_meta(const QuantizedCall& call, const OptionalTensor& beta, const Tensor& out) {
  checked_out(call, beta, out);
}

void quantized_product_out(const QuantizedCall& call, const OptionalTensor& beta, const Tensor& out,
                           bool accumulate) {
  const Operands operands = checked_out(call, beta, out);
  const auto& [a, b, bias, alpha, transpose_b] = operands;
  check_apart(call.op, {{"out", out}},
              {{"a", a.data},
               {"b", b.data},
               {"bias", bias},
               {"a_scale[0]", a.scale},
               {"b_scale[0]", b.scale},
               {"a_scale[1]", a.amax},
               {"b_scale[1]", b.amax},
               {"alpha", alpha},
               {"beta", beta}});
  const BelowAutograd guard;
  const OptionalTensor none;
  if (has_kernel(operands) && run_kernel(operands, beta, out, accumulate)) return;
  if (a.format.traits().has_row_scales) {
    const OptionalTensor factor_of_out = beta_or_one(beta, accumulate, out);
    return rowwise_product_out({a, b, none, bias, none, alpha}, factor_of_out, out);
  }
  with_values(operands, [&](const Tensor& left, const Tensor& right, const OptionalTensor& factor) {
    dense_gemm_out(left, right, operands.bias, factor, beta, out, accumulate);
  });
}

}  // namespace transformer_plugin::gemm
