// grouped_gemm_quantized: grouped_gemm of the values of quantized operands.
#include <torch/library.h>

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/tensor.h"
#include "gemm/block_product.h"
#include "gemm/checks.h"
#include "gemm/grouped_product.h"
#include "gemm/quantized.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "grouped_gemm_quantized";

struct Arguments {
  QuantizedArgument a, b;
  Format a_format = {}, b_format = {};
  c10::SymInt columns = 0;  // of the output
};

Arguments check_grouped_quantized(const Tensor& a, const Tensor& a_scale, const Tensor& b,
                                  const Tensor& b_scale, const Tensor& group_sizes, std::string_view a_key,
                                  std::string_view b_key, at::ScalarType dtype, const OptionalTensor& bias,
                                  const OptionalTensor& bias_scale, bool transpose_b,
                                  const OptionalTensor& a_amax, const OptionalTensor& b_amax) {
  Arguments arguments{{kOp, "a", "a_scale", "a_amax", "a_format", a, a_scale, a_amax, a_key},
                      {kOp, "b", "b_scale", "b_amax", "b_format", b, b_scale, b_amax, b_key}};
  const Argument a_argument{kOp, "a", a};
  const Argument b_argument{kOp, "b", b};
  check_dim(a_argument, 2);
  check_dim(b_argument, 3);
  check_groups({kOp, "group_sizes", group_sizes}, a_argument, b_argument);
  arguments.a_format = check_quantized(arguments.a, 2, &group_sizes, false);
  arguments.b_format = check_quantized(arguments.b, 3, nullptr, false);
  check_same_device(b_argument, a_argument);
  check_value_size(arguments.b, arguments.b_format, transpose_b ? 2 : 1,
                   value_size(arguments.a, arguments.a_format, 1), "the columns of 'a', summed over");
  arguments.columns = value_size(arguments.b, arguments.b_format, transpose_b ? 1 : 2);
  if (bias) check_bias({kOp, "bias", *bias}, a_argument, b.sym_size(0), arguments.columns);
  if (bias_scale) check_bias_scale({kOp, "bias_scale", *bias_scale}, bias.has_value(), a_argument);
  check_rounded_dtype(kOp, dtype);
  return arguments;
}

Tensor grouped_quantized_meta(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                              const Tensor& group_sizes, std::string_view a_key, std::string_view b_key,
                              at::ScalarType dtype, const OptionalTensor& bias,
                              const OptionalTensor& bias_scale, bool transpose_b,
                              const OptionalTensor& a_amax, const OptionalTensor& b_amax) {
  const auto arguments = check_grouped_quantized(a, a_scale, b, b_scale, group_sizes, a_key, b_key, dtype,
                                                 bias, bias_scale, transpose_b, a_amax, b_amax);
  return empty(a, {a.sym_size(0), arguments.columns}, dtype);
}

Tensor grouped_quantized(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                         const Tensor& group_sizes, std::string_view a_key, std::string_view b_key,
                         at::ScalarType dtype, const OptionalTensor& bias, const OptionalTensor& bias_scale,
                         bool transpose_b, const OptionalTensor& a_amax, const OptionalTensor& b_amax) {
  const auto arguments = check_grouped_quantized(a, a_scale, b, b_scale, group_sizes, a_key, b_key, dtype,
                                                 bias, bias_scale, transpose_b, a_amax, b_amax);
  const BelowAutograd guard;
  const Tensor offsets = group_offsets({kOp, "group_sizes", group_sizes}, {kOp, "a", a}, a.size(0));
  if (transpose_b && are_rows_by_squares(arguments.a_format, arguments.b_format)) {
    const Tensor out = block_product({{a, a_scale}, {b, b_scale}, offsets, bias, bias_scale}, dtype);
    if (out.defined()) return out;
  }
  const at::ScalarType exact = values_dtype(arguments.a, arguments.a_format, arguments.b, arguments.b_format);
  const Values left = values_of(arguments.a, arguments.a_format, &group_sizes, false, exact);
  if (b.is_cpu()) {
    const Codes codes = codes_of(arguments.b, arguments.b_format, exact);
    return row_product({left.data, b, offsets, bias, bias_scale, transpose_b, std::nullopt, &codes}, dtype);
  }
  const Values right = values_of(arguments.b, arguments.b_format, nullptr, false, exact);
  return row_product(
      {left.data, right.data, offsets, bias, bias_scale, transpose_b, joint_factor(left, right)}, dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(transformer_plugin, CPU, m) { m.impl(kOp, grouped_quantized); }
TORCH_LIBRARY_IMPL(transformer_plugin, Meta, m) { m.impl(kOp, grouped_quantized_meta); }
// Not differentiable: results have no gradient.
TORCH_LIBRARY_IMPL(transformer_plugin, Autograd, m) { m.impl(kOp, torch::CppFunction::makeFallthrough()); }
#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin, CUDA, m) { m.impl(kOp, grouped_quantized); }
#endif

}  // namespace transformer_plugin::gemm
