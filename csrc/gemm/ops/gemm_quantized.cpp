// gemm_quantized: the product of two quantized matrices, into a new or a given buffer.

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

// The arguments of both ops.
struct Arguments {
  QuantizedArgument a, b;
  const OptionalTensor &bias, &alpha;
  bool transpose_b;
  Format a_format = {}, b_format = {};

  Argument a_argument() const { return {a.op, a.name, a.data}; }
  c10::SymInt rows() const { return a.data.sym_size(0); }
  c10::SymInt columns() const { return value_size(b, b_format, transpose_b ? 0 : 1); }
};

Arguments checked(const char* op, const Tensor& a, const Tensor& a_scale, const Tensor& b,
                  const Tensor& b_scale, std::string_view a_key, std::string_view b_key,
                  const OptionalTensor& bias, bool transpose_b, const OptionalTensor& a_amax,
                  const OptionalTensor& b_amax, const OptionalTensor& alpha) {
  Arguments args{{op, "a", "a_scale", "a_amax", "a_format", a, a_scale, a_amax, a_key},
                 {op, "b", "b_scale", "b_amax", "b_format", b, b_scale, b_amax, b_key},
                 bias,
                 alpha,
                 transpose_b};
  args.a_format = check_quantized(args.a, 2, nullptr, false);
  args.b_format = check_quantized(args.b, 2, nullptr, false);
  check_same_device({op, "b", b}, args.a_argument());
  check_value_size(args.b, args.b_format, transpose_b ? 1 : 0, value_size(args.a, args.a_format, 1),
                   "the columns of 'a', summed over");
  if (bias) check_bias({op, "bias", *bias}, args.a_argument(), std::nullopt, args.columns());
  if (alpha) check_factor({op, "alpha", *alpha}, args.a_argument(), 1);
  return args;
}

// Calls multiply(a, b, alpha) with the dequantized operands.
template <typename Multiply>
auto with_values(const Arguments& args, Multiply&& multiply) {
  const at::ScalarType exact = dequantized_dtype(args.a, args.a_format, args.b, args.b_format);
  const Values left = dequantized_operand(args.a, args.a_format, nullptr, false, exact);
  const Values right = dequantized_operand(args.b, args.b_format, nullptr, false, exact);
  return multiply(left.data, args.transpose_b ? transposed_view(right.data) : right.data,
                  scaled_by(args.alpha, combined_factor(left, right)));
}

Tensor gemm_quantized_meta(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                           std::string_view a_key, std::string_view b_key, at::ScalarType dtype,
                           const OptionalTensor& bias, bool transpose_b, const OptionalTensor& a_amax,
                           const OptionalTensor& b_amax, const OptionalTensor& alpha) {
  const Arguments args =
      checked(kOp, a, a_scale, b, b_scale, a_key, b_key, bias, transpose_b, a_amax, b_amax, alpha);
  check_rounded_dtype(kOp, dtype);
  return empty(a, {args.rows(), args.columns()}, dtype);
}

// Runs an FP8 kernel if one supports the operands: as one group of rows, or of columns, which has no bias. Returns whether it did.
bool run_fp8_kernel(const Arguments& args, const OptionalTensor& beta, const Tensor& out) {
  const QuantizedMatrix a{args.a.data, args.a.scale, args.a_format.tiled_scales},
      b{args.b.data, args.b.scale, args.b_format.tiled_scales};
  const OptionalTensor none;
  const OptionalTensor alpha = alpha_and_amaxes(args.alpha, args.a, args.a_format, args.b, args.b_format);
  const auto rows = quantized_gemm_scales(args.a_format, args.b_format);
  if (rows && run_quantized_gemm_out({*rows, a, b, none, args.bias, none, alpha, beta}, out)) return true;
  const auto columns = quantized_wgrad_scales(args.a_format, args.b_format);
  return columns && !args.bias && run_quantized_wgrad_out({*columns, a, b, none, alpha, beta}, out, false);
}

// Whether an FP8 kernel may run.
bool has_fp8_kernel(const Arguments& args) {
  if (!args.transpose_b || !has_quantized_kernels(args.a.data)) return false;
  return quantized_gemm_scales(args.a_format, args.b_format) ||
         (quantized_wgrad_scales(args.a_format, args.b_format) && !args.bias);
}

Tensor gemm_quantized(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                      std::string_view a_key, std::string_view b_key, at::ScalarType dtype,
                      const OptionalTensor& bias, bool transpose_b, const OptionalTensor& a_amax,
                      const OptionalTensor& b_amax, const OptionalTensor& alpha) {
  const Arguments args =
      checked(kOp, a, a_scale, b, b_scale, a_key, b_key, bias, transpose_b, a_amax, b_amax, alpha);
  check_rounded_dtype(kOp, dtype);
  const BelowAutograd guard;
  if (has_fp8_kernel(args)) {
    const Tensor out = empty(a, {args.rows(), args.columns()}, dtype);
    if (run_fp8_kernel(args, std::nullopt, out)) return out;
  }
  return with_values(args, [&](const Tensor& left, const Tensor& right, const OptionalTensor& factor) {
    return dense_gemm(left, right, bias, dtype, factor);
  });
}

void check_out(const Arguments& args, const Tensor& out, const OptionalTensor& beta) {
  check_result({kOutOp, "out", out}, args.a_argument(), args.rows(), args.columns());
  if (beta) check_factor({kOutOp, "beta", *beta}, args.a_argument(), 1);
}

void gemm_quantized_out_meta(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                             std::string_view a_key, std::string_view b_key, const Tensor& out,
                             const OptionalTensor& bias, bool transpose_b, const OptionalTensor& a_amax,
                             const OptionalTensor& b_amax, const OptionalTensor& alpha,
                             const OptionalTensor& beta) {
  const Arguments args =
      checked(kOutOp, a, a_scale, b, b_scale, a_key, b_key, bias, transpose_b, a_amax, b_amax, alpha);
  check_out(args, out, beta);
}

void gemm_quantized_out(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                        std::string_view a_key, std::string_view b_key, const Tensor& out,
                        const OptionalTensor& bias, bool transpose_b, const OptionalTensor& a_amax,
                        const OptionalTensor& b_amax, const OptionalTensor& alpha,
                        const OptionalTensor& beta) {
  const Arguments args =
      checked(kOutOp, a, a_scale, b, b_scale, a_key, b_key, bias, transpose_b, a_amax, b_amax, alpha);
  check_out(args, out, beta);
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
  if (has_fp8_kernel(args) && run_fp8_kernel(args, beta, out)) return;
  with_values(args, [&](const Tensor& left, const Tensor& right, const OptionalTensor& factor) {
    dense_gemm_out(left, right, bias, factor, beta, out);
  });
}

}  // namespace

// Not differentiable: the results have no gradient.
TP_IMPL_NO_GRADIENT(kOp, gemm_quantized, gemm_quantized_meta);
TP_IMPL_NO_GRADIENT(kOutOp, gemm_quantized_out, gemm_quantized_out_meta);

}  // namespace transformer_plugin::gemm
