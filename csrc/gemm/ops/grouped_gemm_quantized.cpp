// grouped_gemm_quantized: grouped_gemm of quantized operands, into a new or a given buffer.

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/register.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/dequantized_operands.h"
#include "gemm/dispatch/grouped_gemm.h"
#include "gemm/dispatch/quantized_gemm.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "grouped_gemm_quantized";
constexpr const char* kOutOp = "grouped_gemm_quantized_out";

// The arguments of both ops.
struct Arguments {
  QuantizedArgument a, b;
  const Tensor& group_sizes;
  const OptionalTensor &bias, &bias_scale, &alpha;
  bool transpose_b;
  LaunchOptions options;
  Format a_format = {}, b_format = {};

  Argument a_argument() const { return {a.op, a.name, a.data}; }
  Argument b_argument() const { return {b.op, b.name, b.data}; }
  c10::SymInt capacity() const { return a.data.sym_size(0); }
  c10::SymInt columns() const { return value_size(b, b_format, transpose_b ? 1 : 2); }
};

Arguments checked(const char* op, const Tensor& a, const Tensor& a_scale, const Tensor& b,
                  const Tensor& b_scale, const Tensor& group_sizes, std::string_view a_key,
                  std::string_view b_key, const OptionalTensor& bias, const OptionalTensor& bias_scale,
                  bool transpose_b, const OptionalTensor& a_amax, const OptionalTensor& b_amax,
                  const OptionalTensor& alpha, const LaunchOptions& options) {
  Arguments args{{op, "a", "a_scale", "a_amax", "a_format", a, a_scale, a_amax, a_key},
                 {op, "b", "b_scale", "b_amax", "b_format", b, b_scale, b_amax, b_key},
                 group_sizes,
                 bias,
                 bias_scale,
                 alpha,
                 transpose_b,
                 options};
  const Argument a_argument = args.a_argument(), b_argument = args.b_argument();
  check_dim(a_argument, 2);
  check_dim(b_argument, 3);
  check_groups({op, "group_sizes", group_sizes}, a_argument, b_argument);
  args.a_format = check_quantized(args.a, 2, &group_sizes, false);
  args.b_format = check_quantized(args.b, 3, nullptr, false);
  check_same_device(b_argument, a_argument);
  check_value_size(args.b, args.b_format, transpose_b ? 2 : 1, value_size(args.a, args.a_format, 1),
                   "the columns of 'a', summed over");
  if (bias) check_bias({op, "bias", *bias}, a_argument, b.sym_size(0), args.columns());
  if (bias_scale) check_bias_scale({op, "bias_scale", *bias_scale}, bias.has_value(), a_argument);
  if (alpha) check_factor({op, "alpha", *alpha}, a_argument, b.sym_size(0));
  check_launch_options(op, options);
  return args;
}

// Calls multiply(GroupedGemm) with the dequantized operands.
template <typename Multiply>
auto with_values(const Arguments& args, const Tensor& offsets, const OptionalTensor& beta,
                 Multiply&& multiply) {
  const at::ScalarType exact = dequantized_dtype(args.a, args.a_format, args.b, args.b_format);
  const Values left = dequantized_operand(args.a, args.a_format, &args.group_sizes, false, exact);
  if (args.b.data.is_cpu()) {
    const QuantizedStack codes = quantized_stack(args.b, args.b_format, exact);
    return multiply(GroupedGemm{left.data, args.b.data, offsets, args.bias, args.bias_scale, args.transpose_b,
                                args.alpha, beta, std::nullopt, args.options, &codes});
  }
  const Values right = dequantized_operand(args.b, args.b_format, nullptr, false, exact);
  return multiply(GroupedGemm{left.data, right.data, offsets, args.bias, args.bias_scale, args.transpose_b,
                              scaled_by(args.alpha, combined_factor(left, right)), beta, std::nullopt,
                              args.options});
}

Tensor offsets_of(const Arguments& args) {
  const Argument a = args.a_argument();
  return group_offsets({a.op, "group_sizes", args.group_sizes}, a, a.tensor.size(0));
}

// The scale granularity if a kernel may read the quantized data.
std::optional<ScaleGranularity> fp8_kernel_scales(const Arguments& args) {
  if (!args.transpose_b || !has_quantized_kernels(args.a.data)) return std::nullopt;
  return quantized_gemm_scales(args.a_format, args.b_format);
}

// Runs that kernel; returns whether it supported the problem.
bool run_fp8_kernel(const Arguments& args, ScaleGranularity scales, const Tensor& offsets,
                    const OptionalTensor& beta, const Tensor& out) {
  const OptionalTensor groups = offsets;
  const OptionalTensor alpha = alpha_and_amaxes(args.alpha, args.a, args.a_format, args.b, args.b_format);
  const QuantizedGemm problem{scales,
                              {args.a.data, args.a.scale, args.a_format.tiled_scales},
                              {args.b.data, args.b.scale, args.b_format.tiled_scales},
                              groups,
                              args.bias,
                              args.bias_scale,
                              alpha,
                              beta,
                              args.options};
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (args.a.data.is_cuda()) return quantized_gemm_out_cuda(problem, out);
#endif
  return false;
}

Tensor grouped_quantized_meta(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                              const Tensor& group_sizes, std::string_view a_key, std::string_view b_key,
                              at::ScalarType dtype, const OptionalTensor& bias,
                              const OptionalTensor& bias_scale, bool transpose_b,
                              const OptionalTensor& a_amax, const OptionalTensor& b_amax,
                              const OptionalTensor& alpha, int64_t max_sms, int64_t expected_rows) {
  const Arguments args = checked(kOp, a, a_scale, b, b_scale, group_sizes, a_key, b_key, bias, bias_scale,
                                 transpose_b, a_amax, b_amax, alpha, {max_sms, expected_rows});
  check_rounded_dtype(kOp, dtype);
  return empty(a, {args.capacity(), args.columns()}, dtype);
}

Tensor grouped_quantized(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                         const Tensor& group_sizes, std::string_view a_key, std::string_view b_key,
                         at::ScalarType dtype, const OptionalTensor& bias, const OptionalTensor& bias_scale,
                         bool transpose_b, const OptionalTensor& a_amax, const OptionalTensor& b_amax,
                         const OptionalTensor& alpha, int64_t max_sms, int64_t expected_rows) {
  const Arguments args = checked(kOp, a, a_scale, b, b_scale, group_sizes, a_key, b_key, bias, bias_scale,
                                 transpose_b, a_amax, b_amax, alpha, {max_sms, expected_rows});
  check_rounded_dtype(kOp, dtype);
  const BelowAutograd guard;
  const Tensor offsets = offsets_of(args);
  if (const auto scales = fp8_kernel_scales(args)) {
    const Tensor out = empty(a, {args.capacity(), args.columns()}, dtype);
    if (run_fp8_kernel(args, *scales, offsets, std::nullopt, out)) return out;
  }
  return with_values(args, offsets, std::nullopt,
                     [&](const GroupedGemm& product) { return run_grouped_gemm(product, dtype); });
}

void check_out(const Arguments& args, const Tensor& out, const OptionalTensor& beta) {
  check_result({kOutOp, "out", out}, args.a_argument(), args.capacity(), args.columns());
  if (beta) check_factor({kOutOp, "beta", *beta}, args.a_argument(), args.b.data.sym_size(0));
}

void grouped_quantized_out_meta(const Tensor& a, const Tensor& a_scale, const Tensor& b,
                                const Tensor& b_scale, const Tensor& group_sizes, std::string_view a_key,
                                std::string_view b_key, const Tensor& out, const OptionalTensor& bias,
                                const OptionalTensor& bias_scale, bool transpose_b,
                                const OptionalTensor& a_amax, const OptionalTensor& b_amax,
                                const OptionalTensor& alpha, const OptionalTensor& beta, int64_t max_sms,
                                int64_t expected_rows) {
  const Arguments args = checked(kOutOp, a, a_scale, b, b_scale, group_sizes, a_key, b_key, bias, bias_scale,
                                 transpose_b, a_amax, b_amax, alpha, {max_sms, expected_rows});
  check_out(args, out, beta);
}

void grouped_quantized_out(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                           const Tensor& group_sizes, std::string_view a_key, std::string_view b_key,
                           const Tensor& out, const OptionalTensor& bias, const OptionalTensor& bias_scale,
                           bool transpose_b, const OptionalTensor& a_amax, const OptionalTensor& b_amax,
                           const OptionalTensor& alpha, const OptionalTensor& beta, int64_t max_sms,
                           int64_t expected_rows) {
  const Arguments args = checked(kOutOp, a, a_scale, b, b_scale, group_sizes, a_key, b_key, bias, bias_scale,
                                 transpose_b, a_amax, b_amax, alpha, {max_sms, expected_rows});
  check_out(args, out, beta);
  check_apart(kOutOp, {{"out", out}},
              {{"a", a},
               {"b", b},
               {"bias", bias},
               {"bias_scale", bias_scale},
               {"group_sizes", group_sizes},
               {"a_scale", a_scale},
               {"b_scale", b_scale},
               {"a_amax", a_amax},
               {"b_amax", b_amax},
               {"alpha", alpha},
               {"beta", beta}});
  const BelowAutograd guard;
  const Tensor offsets = offsets_of(args);
  const auto scales = fp8_kernel_scales(args);
  if (scales && run_fp8_kernel(args, *scales, offsets, beta, out)) return;
  with_values(args, offsets, beta, [&](const GroupedGemm& product) { run_grouped_gemm_out(product, out); });
}

}  // namespace

// Not differentiable: the results have no gradient.
TP_IMPL_NO_GRADIENT(kOp, grouped_quantized, grouped_quantized_meta);
TP_IMPL_NO_GRADIENT(kOutOp, grouped_quantized_out, grouped_quantized_out_meta);

}  // namespace transformer_plugin::gemm
