// grouped_gemm_wgrad_quantized: grouped_gemm_wgrad of operands quantized along columns.

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/register.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/dequantized_operands.h"
#include "gemm/dispatch/grouped_gemm.h"
#include "gemm/dispatch/quantized_gemm.h"
#include "quantize/ops/group_tables.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "grouped_gemm_wgrad_quantized";
constexpr const char* kOutOp = "grouped_gemm_wgrad_quantized_out";

struct Operands {
  QuantizedArgument grad, input;
  const Tensor& group_sizes;
  LaunchOptions options;
  Format grad_format = {}, input_format = {};

  Argument grad_argument() const { return {grad.op, grad.name, grad.data}; }
  int64_t rows() const {
    return quantize::shape_of_data(grad.data, grad_format, true, &group_sizes).rows.expect_int();
  }
  Tensor offsets() const {
    const int64_t multiple = quantize::group_multiple(grad_format, true);
    quantize::check_group_values_of(grad_argument(), rows(), group_sizes, multiple);
    return group_offsets({grad.op, "group_sizes", group_sizes}, grad_argument(), rows());
  }
  std::vector<c10::SymInt> sizes() const {
    return {group_sizes.sym_size(0), grad.data.sym_size(0), input.data.sym_size(0)};
  }
};

Operands check_operands(const char* op, const Tensor& grad_t, const Tensor& grad_t_scale,
                        const Tensor& input_t, const Tensor& input_t_scale, const Tensor& group_sizes,
                        std::string_view grad_key, std::string_view input_key,
                        const OptionalTensor& grad_t_amax, const OptionalTensor& input_t_amax,
                        const OptionalTensor& alpha, const LaunchOptions& options) {
  Operands operands{{op, "grad_t", "grad_t_scale", "grad_t_amax", "grad_format", grad_t, grad_t_scale,
                     grad_t_amax, grad_key},
                    {op, "input_t", "input_t_scale", "input_t_amax", "input_format", input_t, input_t_scale,
                     input_t_amax, input_key},
                    group_sizes,
                    options};
  const Argument grad_argument{op, "grad_t", grad_t};
  const Argument input_argument{op, "input_t", input_t};
  check_dim(grad_argument, 2);
  check_dim(input_argument, 2);
  check_group_sizes({op, "group_sizes", group_sizes}, grad_argument);
  operands.grad_format = check_quantized(operands.grad, 2, &group_sizes, true);
  operands.input_format = check_quantized(operands.input, 2, &group_sizes, true);
  check_same_device(input_argument, grad_argument);
  TP_CHECK_VALUE(operands.grad_format.aligned_groups == operands.input_format.aligned_groups, op,
                 "input_format", "'aligned' if and only if grad_format, '" << grad_key << "', has it",
                 "'" << input_key << "'", "Quantize both operands with it or both without");
  check_value_size(operands.input, operands.input_format, 1,
                   value_size(operands.grad, operands.grad_format, 1),
                   "the columns of 'grad_t', the rows of the buffer");
  if (alpha) check_factor({op, "alpha", *alpha}, grad_argument, group_sizes.sym_size(0));
  check_launch_options(op, options);
  return operands;
}

// The scale granularity if a kernel may read the quantized data.
std::optional<ScaleGranularity> fp8_kernel_scales(const Operands& operands) {
  if (!has_quantized_kernels(operands.grad.data)) return std::nullopt;
  return quantized_wgrad_scales(operands.grad_format, operands.input_format);
}

// Runs that kernel; returns whether it supported the problem.
bool run_fp8_kernel(const Operands& operands, ScaleGranularity scales, const OptionalTensor& offsets,
                    const OptionalTensor& alpha, const OptionalTensor& beta, const Tensor& out,
                    bool accumulate) {
  const QuantizedArgument &grad = operands.grad, &input = operands.input;
  return run_quantized_wgrad_out({scales,
                                  {grad.data, grad.scale},
                                  {input.data, input.scale},
                                  offsets,
                                  alpha,
                                  beta,
                                  operands.options,
                                  operands.grad_format.aligned_groups},
                                 out, accumulate);
}

template <typename Multiply>
auto with_values(const Operands& operands, const Tensor& offsets, const OptionalTensor& alpha,
                 const OptionalTensor& beta, Multiply&& multiply) {
  const Tensor& sizes = operands.group_sizes;
  const at::ScalarType exact =
      dequantized_dtype(operands.grad, operands.grad_format, operands.input, operands.input_format);
  const Values grad = dequantized_operand(operands.grad, operands.grad_format, &sizes, true, exact);
  const Values input = dequantized_operand(operands.input, operands.input_format, &sizes, true, exact);
  return multiply(GroupedWgrad{grad.data, input.data, offsets, scaled_by(alpha, combined_factor(grad, input)),
                               beta, std::nullopt, operands.options});
}

Tensor wgrad_meta(const Tensor& grad_t, const Tensor& grad_t_scale, const Tensor& input_t,
                  const Tensor& input_t_scale, const Tensor& group_sizes, std::string_view grad_key,
                  std::string_view input_key, at::ScalarType dtype, const OptionalTensor& grad_t_amax,
                  const OptionalTensor& input_t_amax, const OptionalTensor& alpha, int64_t max_sms,
                  int64_t expected_rows) {
  const Operands operands =
      check_operands(kOp, grad_t, grad_t_scale, input_t, input_t_scale, group_sizes, grad_key, input_key,
                     grad_t_amax, input_t_amax, alpha, {max_sms, expected_rows});
  check_rounded_dtype(kOp, dtype);
  return empty(grad_t, operands.sizes(), dtype);
}

Tensor wgrad(const Tensor& grad_t, const Tensor& grad_t_scale, const Tensor& input_t,
             const Tensor& input_t_scale, const Tensor& group_sizes, std::string_view grad_key,
             std::string_view input_key, at::ScalarType dtype, const OptionalTensor& grad_t_amax,
             const OptionalTensor& input_t_amax, const OptionalTensor& alpha, int64_t max_sms,
             int64_t expected_rows) {
  const Operands operands =
      check_operands(kOp, grad_t, grad_t_scale, input_t, input_t_scale, group_sizes, grad_key, input_key,
                     grad_t_amax, input_t_amax, alpha, {max_sms, expected_rows});
  check_rounded_dtype(kOp, dtype);
  const BelowAutograd guard;
  const Tensor offsets = operands.offsets();
  if (const auto scales = fp8_kernel_scales(operands)) {
    const Tensor out = empty(grad_t, {offsets.size(0) - 1, grad_t.size(0), input_t.size(0)}, dtype);
    if (run_fp8_kernel(operands, *scales, offsets, alpha, std::nullopt, out, false)) return out;
  }
  return with_values(operands, offsets, alpha, std::nullopt,
                     [&](const GroupedWgrad& product) { return run_grouped_wgrad(product, dtype); });
}

void wgrad_out_meta(const Tensor& grad_t, const Tensor& grad_t_scale, const Tensor& input_t,
                    const Tensor& input_t_scale, const Tensor& group_sizes, std::string_view grad_key,
                    std::string_view input_key, const Tensor& out, bool accumulate,
                    const OptionalTensor& grad_t_amax, const OptionalTensor& input_t_amax,
                    const OptionalTensor& alpha, const OptionalTensor& beta, int64_t max_sms,
                    int64_t expected_rows) {
  const Operands operands =
      check_operands(kOutOp, grad_t, grad_t_scale, input_t, input_t_scale, group_sizes, grad_key, input_key,
                     grad_t_amax, input_t_amax, alpha, {max_sms, expected_rows});
  check_accumulator({kOutOp, "out", out}, operands.grad_argument(), operands.sizes());
  if (beta) check_beta({kOutOp, "beta", *beta}, operands.grad_argument(), group_sizes, accumulate);
}

void wgrad_out(const Tensor& grad_t, const Tensor& grad_t_scale, const Tensor& input_t,
               const Tensor& input_t_scale, const Tensor& group_sizes, std::string_view grad_key,
               std::string_view input_key, const Tensor& out, bool accumulate,
               const OptionalTensor& grad_t_amax, const OptionalTensor& input_t_amax,
               const OptionalTensor& alpha, const OptionalTensor& beta, int64_t max_sms,
               int64_t expected_rows) {
  const Operands operands =
      check_operands(kOutOp, grad_t, grad_t_scale, input_t, input_t_scale, group_sizes, grad_key, input_key,
                     grad_t_amax, input_t_amax, alpha, {max_sms, expected_rows});
  check_accumulator({kOutOp, "out", out}, operands.grad_argument(), operands.sizes());
  if (beta) check_beta({kOutOp, "beta", *beta}, operands.grad_argument(), group_sizes, accumulate);
  check_apart(kOutOp, {{"out", out}},
              {{"grad_t", grad_t},
               {"input_t", input_t},
               {"group_sizes", group_sizes},
               {"grad_t_scale", grad_t_scale},
               {"input_t_scale", input_t_scale},
               {"grad_t_amax", grad_t_amax},
               {"input_t_amax", input_t_amax},
               {"alpha", alpha},
               {"beta", beta}});
  const BelowAutograd guard;
  const Tensor offsets = operands.offsets();
  const auto scales = fp8_kernel_scales(operands);
  if (scales && run_fp8_kernel(operands, *scales, offsets, alpha, beta, out, accumulate)) return;
  with_values(operands, offsets, alpha, beta,
              [&](const GroupedWgrad& product) { run_grouped_wgrad_out(product, out, accumulate); });
}

}  // namespace

// Not differentiable: the results have no gradient.
TP_IMPL_NO_GRADIENT(kOp, wgrad, wgrad_meta);
TP_IMPL_NO_GRADIENT(kOutOp, wgrad_out, wgrad_out_meta);

}  // namespace transformer_plugin::gemm
