// grouped_linear: the rows of each group times the group's weight [N, K] transposed, plus its bias, with its
// gradient, in any format.

#include "common/autograd.h"
#include "common/register.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/ops/calls.h"
#include "linear/quantized_linear.h"
#include "linear/quantized_weight.h"

namespace transformer_plugin::linear {

using namespace gemm;  // layers are made of its ops and checks
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "grouped_linear";

OperandFormats check_grouped_linear(const Tensor& input, const Tensor& weight, const Tensor& group_sizes,
                                    const OptionalTensor& bias, const OptionalTensor& bias_scale,
                                    std::string_view input_format, std::string_view weight_format,
                                    std::string_view grad_format, OptionalList quantized_weight,
                                    const LaunchOptions& options) {
  const OperandFormats formats = operand_formats(kOp, input_format, weight_format, grad_format);
  const Argument input_argument{kOp, "input", input};
  const Argument weight_argument{kOp, "weight", weight};
  if (formats.native()) {
    check_grouped_operand(input_argument, 2);
  } else {
    check_dtype(input_argument, kFloatTypes);
    check_dim(input_argument, 2);
  }
  check_pair(weight_argument, input_argument, 3);
  check_size(weight_argument, 2, input.sym_size(1), "the columns of 'input'");
  check_layer_widths(input_argument, weight_argument, formats);
  check_groups({kOp, "group_sizes", group_sizes}, input_argument, weight_argument);
  if (bias) check_bias({kOp, "bias", *bias}, input_argument, weight.sym_size(0), weight.sym_size(1));
  if (bias_scale) check_bias_scale({kOp, "bias_scale", *bias_scale}, bias.has_value(), input_argument);
  check_launch_options(kOp, options);
  check_ragged_formats(kOp, formats);
  check_quantized_weight("quantized_weight", quantized_weight, weight_argument, formats);
  return formats;
}

Tensor grouped_linear_meta(const Tensor& input, const Tensor& weight, const Tensor& group_sizes,
                           const OptionalTensor& bias, const OptionalTensor& bias_scale,
                           std::string_view input_format, std::string_view weight_format,
                           std::string_view grad_format, OptionalList quantized_weight, int64_t max_sms,
                           int64_t expected_rows) {
  check_grouped_linear(input, weight, group_sizes, bias, bias_scale, input_format, weight_format, grad_format,
                       quantized_weight, {max_sms, expected_rows});
  return empty(input, {input.sym_size(0), weight.sym_size(1)}, input.scalar_type());
}

Tensor grouped_linear(const Tensor& input, const Tensor& weight, const Tensor& group_sizes,
                      const OptionalTensor& bias, const OptionalTensor& bias_scale,
                      std::string_view input_format, std::string_view weight_format,
                      std::string_view grad_format, OptionalList quantized_weight, int64_t max_sms,
                      int64_t expected_rows) {
  const OperandFormats formats =
      check_grouped_linear(input, weight, group_sizes, bias, bias_scale, input_format, weight_format,
                           grad_format, quantized_weight, {max_sms, expected_rows});
  const OptionalTensor sizes = group_sizes;
  const LinearArguments layer{
      input, weight, sizes, bias, bias_scale, quantized_weight, {max_sms, expected_rows}};
  check_quantizable(kOp, layer, formats, false);
  const BelowAutograd guard;
  if (formats.native())
    return call_grouped_gemm(input, weight, group_sizes, bias, bias_scale, true, std::nullopt, std::nullopt,
                             std::nullopt, layer.options);
  return quantized_linear_forward(layer, formats);
}

Tensor grouped_linear_autograd(const Tensor& input, const Tensor& weight, const Tensor& group_sizes,
                               const OptionalTensor& bias, const OptionalTensor& bias_scale,
                               std::string_view input_format, std::string_view weight_format,
                               std::string_view grad_format, OptionalList quantized_weight, int64_t max_sms,
                               int64_t expected_rows) {
  if (!any_wants_grad(input, weight, bias, bias_scale)) {
    using Signature =
        Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
               std::string_view, std::string_view, std::string_view, OptionalList, int64_t, int64_t);
    static const auto op = find_op<Signature>(kOp);
    const BelowAutograd guard;
    return op.call(input, weight, group_sizes, bias, bias_scale, input_format, weight_format, grad_format,
                   quantized_weight, max_sms, expected_rows);
  }
  const OperandFormats formats =
      check_grouped_linear(input, weight, group_sizes, bias, bias_scale, input_format, weight_format,
                           grad_format, quantized_weight, {max_sms, expected_rows});
  const OptionalTensor sizes = group_sizes;
  const LinearArguments layer{
      input, weight, sizes, bias, bias_scale, quantized_weight, {max_sms, expected_rows}};
  check_quantizable(kOp, layer, formats, weight.requires_grad());
  if (formats.native())
    return call_grouped_gemm(input, weight, group_sizes, bias, bias_scale, true, std::nullopt, std::nullopt,
                             std::nullopt, layer.options);
  return quantized_linear_autograd(layer, formats);
}

}  // namespace

TP_IMPL(kOp, grouped_linear, grouped_linear_meta, grouped_linear_autograd);

}  // namespace transformer_plugin::linear
