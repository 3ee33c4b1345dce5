#include "gemm/ops/wgrad_quantized.h"

#include <utility>

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "gemm/dispatch/checks.h"
#include "quantize/ops/group_tables.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

}  // namespace

QuantizedWgradCall::QuantizedWgradCall(const char* op, const OperandArguments& grad,
                                       const OperandArguments& input, const Tensor& group_sizes,
                                       const OptionalTensor& alpha, const OptionalTensor& input_rows,
                                       const OptionalTensor& grad_rows, const LaunchOptions& options)
    : op_(op), group_sizes_(group_sizes), alpha_(alpha), options_(options) {
  const OperandNames grad_names = names_of_grad(op), input_names = names_of_input(op);
  const Argument grad_argument{op, "grad", grad.data}, input_argument{op, "input", input.data};
  check_dim(grad_argument, 2);
  check_dim(input_argument, 2);
  check_group_sizes({op, "group_sizes", group_sizes}, grad_argument);
  grad_ = parsed_operand(grad_names, grad, false, true);
  input_ = parsed_operand(input_names, input, false, true);
  check_wgrad_formats(grad_names, grad_, input_names, input_);
  check_quantized(grad_names, grad_, 2, &group_sizes);
  check_quantized(input_names, input_, 2, &group_sizes);
  check_same_device(input_argument, grad_argument);
  check_value_size(input_names, input_, 1, grad_.row_length(),
                   "the columns of 'grad', the rows of the buffer");
  const auto check_no_rows = [&](const char* name, const OptionalTensor& index) {
    TP_CHECK_VALUE(!index, op, name, "None with quantized operands", describe(*index),
                   "Take the rows before they are quantized");
  };
  check_no_rows("input_rows", input_rows);
  check_no_rows("grad_rows", grad_rows);
  if (alpha) check_factor({op, "alpha", *alpha}, grad_argument, group_sizes.sym_size(0));
  check_launch_options(op, options);
}

Tensor QuantizedWgradCall::offsets() const {
  const auto shape = quantize::shape_of_data(grad_.data, grad_.format, true, &group_sizes_);
  const int64_t rows = shape.rows.expect_int();
  const int64_t multiple = quantize::group_multiple(grad_.format, true);
  quantize::check_group_values_of(grad_argument(), rows, group_sizes_, multiple);
  return group_offsets({op_, "group_sizes", group_sizes_}, grad_argument(), rows);
}

std::optional<OperandScaling> QuantizedWgradCall::kernel_scales() const {
  if (!has_quantized_kernels(grad_.data)) return std::nullopt;
  return quantized_wgrad_scales(grad_.format, input_.format);
}

// Calls multiply(GroupedWgrad) with the dequantized operands.
template <typename Multiply>
auto QuantizedWgradCall::with_values(const Tensor& offsets, const OptionalTensor& beta,
                                     Multiply&& multiply) const {
  const at::ScalarType exact = dequantized_dtype(grad_, input_);
  const Quantized grad = dequantized_operand(grad_, &group_sizes_, exact);
  const Quantized input = dequantized_operand(input_, &group_sizes_, exact);
  return multiply(GroupedWgrad{grad.data, input.data, offsets, alpha_and_factors(alpha_, grad, input), beta,
                               std::nullopt, std::nullopt, options_});
}

Tensor QuantizedWgradCall::dequantized_product(const Tensor& offsets, at::ScalarType dtype) const {
  return with_values(offsets, std::nullopt,
                     [&](const GroupedWgrad& product) { return run_grouped_wgrad(product, dtype); });
}

void QuantizedWgradCall::dequantized_product_out(const Tensor& offsets, const OptionalTensor& beta,
                                                 at::TensorList out, bool accumulate) const {
  with_values(offsets, beta,
              [&](const GroupedWgrad& product) { run_grouped_wgrad_out(product, out, accumulate); });
}

}  // namespace transformer_plugin::gemm
