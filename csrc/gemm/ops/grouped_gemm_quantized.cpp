// grouped_gemm_quantized: grouped_gemm of the values of quantized operands, fresh or into a given buffer.

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

// What both ops are given.
struct Given {
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

Given checked(const char* op, const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
              const Tensor& group_sizes, std::string_view a_key, std::string_view b_key,
              const OptionalTensor& bias, const OptionalTensor& bias_scale, bool transpose_b,
              const OptionalTensor& a_amax, const OptionalTensor& b_amax, const OptionalTensor& alpha,
              const LaunchOptions& options) {
  Given given{{op, "a", "a_scale", "a_amax", "a_format", a, a_scale, a_amax, a_key},
              {op, "b", "b_scale", "b_amax", "b_format", b, b_scale, b_amax, b_key},
              group_sizes,
              bias,
              bias_scale,
              alpha,
              transpose_b,
              options};
  const Argument a_argument = given.a_argument(), b_argument = given.b_argument();
  check_dim(a_argument, 2);
  check_dim(b_argument, 3);
  check_groups({op, "group_sizes", group_sizes}, a_argument, b_argument);
  given.a_format = check_quantized(given.a, 2, &group_sizes, false);
  given.b_format = check_quantized(given.b, 3, nullptr, false);
  check_same_device(b_argument, a_argument);
  check_value_size(given.b, given.b_format, transpose_b ? 2 : 1, value_size(given.a, given.a_format, 1),
                   "the columns of 'a', summed over");
  if (bias) check_bias({op, "bias", *bias}, a_argument, b.sym_size(0), given.columns());
  if (bias_scale) check_bias_scale({op, "bias_scale", *bias_scale}, bias.has_value(), a_argument);
  if (alpha) check_factor({op, "alpha", *alpha}, a_argument, b.sym_size(0));
  check_launch_options(op, options);
  return given;
}

// Calls multiply(GroupedGemm) on the values of both operands.
template <typename Multiply>
auto with_values(const Given& given, const Tensor& offsets, const OptionalTensor& beta, Multiply&& multiply) {
  const at::ScalarType exact = dequantized_dtype(given.a, given.a_format, given.b, given.b_format);
  const Values left = dequantized_operand(given.a, given.a_format, &given.group_sizes, false, exact);
  if (given.b.data.is_cpu()) {
    const Codes codes = quantized_stack(given.b, given.b_format, exact);
    return multiply(GroupedGemm{left.data, given.b.data, offsets, given.bias, given.bias_scale,
                                given.transpose_b, given.alpha, beta, std::nullopt, given.options, &codes});
  }
  const Values right = dequantized_operand(given.b, given.b_format, nullptr, false, exact);
  return multiply(GroupedGemm{left.data, right.data, offsets, given.bias, given.bias_scale, given.transpose_b,
                              scaled_by(given.alpha, combined_factor(left, right)), beta, std::nullopt,
                              given.options});
}

Tensor offsets_of(const Given& given) {
  const Argument a = given.a_argument();
  return group_offsets({a.op, "group_sizes", given.group_sizes}, a, a.tensor.size(0));
}

// Whether kernels may multiply the codes as they are.
std::optional<ScaleGranularity> code_scales(const Given& given) {
  if (!given.transpose_b || !has_quantized_kernels(given.a.data)) return std::nullopt;
  return quantized_gemm_scales(given.a_format, given.b_format);
}

// Whether they did.
bool multiply_codes(const Given& given, ScaleGranularity scales, const Tensor& offsets,
                    const OptionalTensor& beta, const Tensor& out) {
  const OptionalTensor groups = offsets;
  const OptionalTensor alpha =
      alpha_and_amaxes(given.alpha, given.a, given.a_format, given.b, given.b_format);
  return run_quantized_gemm_out({scales,
                                 {given.a.data, given.a.scale, given.a_format.tiled_scales},
                                 {given.b.data, given.b.scale, given.b_format.tiled_scales},
                                 groups,
                                 given.bias,
                                 given.bias_scale,
                                 alpha,
                                 beta,
                                 given.options},
                                out);
}

Tensor grouped_quantized_meta(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                              const Tensor& group_sizes, std::string_view a_key, std::string_view b_key,
                              at::ScalarType dtype, const OptionalTensor& bias,
                              const OptionalTensor& bias_scale, bool transpose_b,
                              const OptionalTensor& a_amax, const OptionalTensor& b_amax,
                              const OptionalTensor& alpha, int64_t max_sms, int64_t expected_rows) {
  const Given given = checked(kOp, a, a_scale, b, b_scale, group_sizes, a_key, b_key, bias, bias_scale,
                              transpose_b, a_amax, b_amax, alpha, {max_sms, expected_rows});
  check_rounded_dtype(kOp, dtype);
  return empty(a, {given.capacity(), given.columns()}, dtype);
}

Tensor grouped_quantized(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                         const Tensor& group_sizes, std::string_view a_key, std::string_view b_key,
                         at::ScalarType dtype, const OptionalTensor& bias, const OptionalTensor& bias_scale,
                         bool transpose_b, const OptionalTensor& a_amax, const OptionalTensor& b_amax,
                         const OptionalTensor& alpha, int64_t max_sms, int64_t expected_rows) {
  const Given given = checked(kOp, a, a_scale, b, b_scale, group_sizes, a_key, b_key, bias, bias_scale,
                              transpose_b, a_amax, b_amax, alpha, {max_sms, expected_rows});
  check_rounded_dtype(kOp, dtype);
  const BelowAutograd guard;
  const Tensor offsets = offsets_of(given);
  if (const auto scales = code_scales(given)) {
    const Tensor out = empty(a, {given.capacity(), given.columns()}, dtype);
    if (multiply_codes(given, *scales, offsets, std::nullopt, out)) return out;
  }
  return with_values(given, offsets, std::nullopt,
                     [&](const GroupedGemm& product) { return run_grouped_gemm(product, dtype); });
}

void check_out(const Given& given, const Tensor& out, const OptionalTensor& beta) {
  check_result({kOutOp, "out", out}, given.a_argument(), given.capacity(), given.columns());
  if (beta) check_factor({kOutOp, "beta", *beta}, given.a_argument(), given.b.data.sym_size(0));
}

void grouped_quantized_out_meta(const Tensor& a, const Tensor& a_scale, const Tensor& b,
                                const Tensor& b_scale, const Tensor& group_sizes, std::string_view a_key,
                                std::string_view b_key, const Tensor& out, const OptionalTensor& bias,
                                const OptionalTensor& bias_scale, bool transpose_b,
                                const OptionalTensor& a_amax, const OptionalTensor& b_amax,
                                const OptionalTensor& alpha, const OptionalTensor& beta, int64_t max_sms,
                                int64_t expected_rows) {
  const Given given = checked(kOutOp, a, a_scale, b, b_scale, group_sizes, a_key, b_key, bias, bias_scale,
                              transpose_b, a_amax, b_amax, alpha, {max_sms, expected_rows});
  check_out(given, out, beta);
}

void grouped_quantized_out(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                           const Tensor& group_sizes, std::string_view a_key, std::string_view b_key,
                           const Tensor& out, const OptionalTensor& bias, const OptionalTensor& bias_scale,
                           bool transpose_b, const OptionalTensor& a_amax, const OptionalTensor& b_amax,
                           const OptionalTensor& alpha, const OptionalTensor& beta, int64_t max_sms,
                           int64_t expected_rows) {
  const Given given = checked(kOutOp, a, a_scale, b, b_scale, group_sizes, a_key, b_key, bias, bias_scale,
                              transpose_b, a_amax, b_amax, alpha, {max_sms, expected_rows});
  check_out(given, out, beta);
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
  const Tensor offsets = offsets_of(given);
  const auto scales = code_scales(given);
  if (scales && multiply_codes(given, *scales, offsets, beta, out)) return;
  with_values(given, offsets, beta, [&](const GroupedGemm& product) { run_grouped_gemm_out(product, out); });
}

}  // namespace

// Not differentiable: results have no gradient.
TP_IMPL_NO_GRADIENT(kOp, grouped_quantized, grouped_quantized_meta);
TP_IMPL_NO_GRADIENT(kOutOp, grouped_quantized_out, grouped_quantized_out_meta);

}  // namespace transformer_plugin::gemm
