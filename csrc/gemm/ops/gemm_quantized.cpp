// gemm_quantized: the product of the values of two quantized matrices, fresh or into a given buffer.

#include "common/autograd.h"
#include "common/register.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/dequantized_operands.h"
#include "gemm/dispatch/quantized_gemm.h"
#include "gemm/generic/dense_gemm.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "gemm_quantized";
constexpr const char* kOutOp = "gemm_quantized_out";

// What both ops are given.
struct Given {
  QuantizedArgument a, b;
  const OptionalTensor &bias, &alpha;
  bool transpose_b;
  Format a_format = {}, b_format = {};

  Argument a_argument() const { return {a.op, a.name, a.data}; }
  c10::SymInt rows() const { return a.data.sym_size(0); }
  c10::SymInt columns() const { return value_size(b, b_format, transpose_b ? 0 : 1); }
};

Given checked(const char* op, const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
              std::string_view a_key, std::string_view b_key, const OptionalTensor& bias, bool transpose_b,
              const OptionalTensor& a_amax, const OptionalTensor& b_amax, const OptionalTensor& alpha) {
  Given given{{op, "a", "a_scale", "a_amax", "a_format", a, a_scale, a_amax, a_key},
              {op, "b", "b_scale", "b_amax", "b_format", b, b_scale, b_amax, b_key},
              bias,
              alpha,
              transpose_b};
  given.a_format = check_quantized(given.a, 2, nullptr, false);
  given.b_format = check_quantized(given.b, 2, nullptr, false);
  check_same_device({op, "b", b}, given.a_argument());
  check_value_size(given.b, given.b_format, transpose_b ? 1 : 0, value_size(given.a, given.a_format, 1),
                   "the columns of 'a', summed over");
  if (bias) check_bias({op, "bias", *bias}, given.a_argument(), std::nullopt, given.columns());
  if (alpha) check_factor({op, "alpha", *alpha}, given.a_argument(), 1);
  return given;
}

// Calls multiply(a, b, alpha) with the values of both operands.
template <typename Multiply>
auto with_values(const Given& given, Multiply&& multiply) {
  const at::ScalarType exact = dequantized_dtype(given.a, given.a_format, given.b, given.b_format);
  const Values left = dequantized_operand(given.a, given.a_format, nullptr, false, exact);
  const Values right = dequantized_operand(given.b, given.b_format, nullptr, false, exact);
  return multiply(left.data, given.transpose_b ? transposed_view(right.data) : right.data,
                  scaled_by(given.alpha, combined_factor(left, right)));
}

Tensor gemm_quantized_meta(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                           std::string_view a_key, std::string_view b_key, at::ScalarType dtype,
                           const OptionalTensor& bias, bool transpose_b, const OptionalTensor& a_amax,
                           const OptionalTensor& b_amax, const OptionalTensor& alpha) {
  const Given given =
      checked(kOp, a, a_scale, b, b_scale, a_key, b_key, bias, transpose_b, a_amax, b_amax, alpha);
  check_rounded_dtype(kOp, dtype);
  return empty(a, {given.rows(), given.columns()}, dtype);
}

// Whether kernels multiplied the codes as they are: as one group of rows, or else as one of columns, which has no bias.
bool multiply_codes(const Given& given, const OptionalTensor& beta, const Tensor& out) {
  const QuantizedMatrix a{given.a.data, given.a.scale, given.a_format.tiled_scales},
      b{given.b.data, given.b.scale, given.b_format.tiled_scales};
  const OptionalTensor none;
  const OptionalTensor alpha =
      alpha_and_amaxes(given.alpha, given.a, given.a_format, given.b, given.b_format);
  const auto rows = quantized_gemm_scales(given.a_format, given.b_format);
  if (rows && run_quantized_gemm_out({*rows, a, b, none, given.bias, none, alpha, beta}, out)) return true;
  const auto columns = quantized_wgrad_scales(given.a_format, given.b_format);
  return columns && !given.bias && run_quantized_wgrad_out({*columns, a, b, none, alpha, beta}, out, false);
}

// Whether they may.
bool multiplies_codes(const Given& given) {
  if (!given.transpose_b || !has_quantized_kernels(given.a.data)) return false;
  return quantized_gemm_scales(given.a_format, given.b_format) ||
         (quantized_wgrad_scales(given.a_format, given.b_format) && !given.bias);
}

Tensor gemm_quantized(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                      std::string_view a_key, std::string_view b_key, at::ScalarType dtype,
                      const OptionalTensor& bias, bool transpose_b, const OptionalTensor& a_amax,
                      const OptionalTensor& b_amax, const OptionalTensor& alpha) {
  const Given given =
      checked(kOp, a, a_scale, b, b_scale, a_key, b_key, bias, transpose_b, a_amax, b_amax, alpha);
  check_rounded_dtype(kOp, dtype);
  const BelowAutograd guard;
  if (multiplies_codes(given)) {
    const Tensor out = empty(a, {given.rows(), given.columns()}, dtype);
    if (multiply_codes(given, std::nullopt, out)) return out;
  }
  return with_values(given, [&](const Tensor& left, const Tensor& right, const OptionalTensor& factor) {
    return dense_gemm(left, right, bias, dtype, factor);
  });
}

void check_out(const Given& given, const Tensor& out, const OptionalTensor& beta) {
  check_result({kOutOp, "out", out}, given.a_argument(), given.rows(), given.columns());
  if (beta) check_factor({kOutOp, "beta", *beta}, given.a_argument(), 1);
}

void gemm_quantized_out_meta(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                             std::string_view a_key, std::string_view b_key, const Tensor& out,
                             const OptionalTensor& bias, bool transpose_b, const OptionalTensor& a_amax,
                             const OptionalTensor& b_amax, const OptionalTensor& alpha,
                             const OptionalTensor& beta) {
  const Given given =
      checked(kOutOp, a, a_scale, b, b_scale, a_key, b_key, bias, transpose_b, a_amax, b_amax, alpha);
  check_out(given, out, beta);
}

void gemm_quantized_out(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                        std::string_view a_key, std::string_view b_key, const Tensor& out,
                        const OptionalTensor& bias, bool transpose_b, const OptionalTensor& a_amax,
                        const OptionalTensor& b_amax, const OptionalTensor& alpha,
                        const OptionalTensor& beta) {
  const Given given =
      checked(kOutOp, a, a_scale, b, b_scale, a_key, b_key, bias, transpose_b, a_amax, b_amax, alpha);
  check_out(given, out, beta);
  check_apart(kOutOp, {{"out", out}},
              {{"a", a},
               {"b", b},
               {"bias", bias},
               {"a_scale", a_scale},
               {"b_scale", b_scale},
               {"a_amax", a_amax},
               {"b_amax", b_amax},
               {"alpha", alpha},
               {"beta", beta}});
  const BelowAutograd guard;
  if (multiplies_codes(given) && multiply_codes(given, beta, out)) return;
  with_values(given, [&](const Tensor& left, const Tensor& right, const OptionalTensor& factor) {
    dense_gemm_out(left, right, bias, factor, beta, out);
  });
}

}  // namespace

// Not differentiable: results have no gradient.
TP_IMPL_NO_GRADIENT(kOp, gemm_quantized, gemm_quantized_meta);
TP_IMPL_NO_GRADIENT(kOutOp, gemm_quantized_out, gemm_quantized_out_meta);

}  // namespace transformer_plugin::gemm
