// gemm_quantized: the product of the values of two quantized matrices.
#include <torch/library.h>

#include "common/autograd.h"
#include "common/tensor.h"
#include "gemm/block_product.h"
#include "gemm/checks.h"
#include "gemm/dense_product.h"
#include "gemm/quantized.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "gemm_quantized";

struct Arguments {
  QuantizedArgument a, b;
  Format a_format = {}, b_format = {};
  c10::SymInt columns = 0;  // of the output
};

Arguments check_gemm_quantized(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                               std::string_view a_key, std::string_view b_key, at::ScalarType dtype,
                               const OptionalTensor& bias, bool transpose_b, const OptionalTensor& a_amax,
                               const OptionalTensor& b_amax) {
  Arguments arguments{{kOp, "a", "a_scale", "a_amax", "a_format", a, a_scale, a_amax, a_key},
                      {kOp, "b", "b_scale", "b_amax", "b_format", b, b_scale, b_amax, b_key}};
  arguments.a_format = check_quantized(arguments.a, 2, nullptr, false);
  arguments.b_format = check_quantized(arguments.b, 2, nullptr, false);
  const Argument b_argument{kOp, "b", b};
  check_same_device(b_argument, {kOp, "a", a});
  check_value_size(arguments.b, arguments.b_format, transpose_b ? 1 : 0,
                   value_size(arguments.a, arguments.a_format, 1), "the columns of 'a', summed over");
  arguments.columns = value_size(arguments.b, arguments.b_format, transpose_b ? 0 : 1);
  if (bias) check_bias({kOp, "bias", *bias}, {kOp, "a", a}, std::nullopt, arguments.columns);
  check_rounded_dtype(kOp, dtype);
  return arguments;
}

Tensor gemm_quantized_meta(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                           std::string_view a_key, std::string_view b_key, at::ScalarType dtype,
                           const OptionalTensor& bias, bool transpose_b, const OptionalTensor& a_amax,
                           const OptionalTensor& b_amax) {
  const auto arguments =
      check_gemm_quantized(a, a_scale, b, b_scale, a_key, b_key, dtype, bias, transpose_b, a_amax, b_amax);
  return empty(a, {a.sym_size(0), arguments.columns}, dtype);
}

// Undefined where no kernel multiplies blocks as they are.
Tensor block_product_of(const Arguments& arguments, at::ScalarType dtype, const OptionalTensor& bias,
                        bool transpose_b) {
  const BlockOperand a{arguments.a.data, arguments.a.scale}, b{arguments.b.data, arguments.b.scale};
  if (!transpose_b) return Tensor();
  if (are_rows_by_squares(arguments.a_format, arguments.b_format)) {
    return block_product({a, b, std::nullopt, bias, std::nullopt}, dtype);
  }
  if (bias || !are_rows_by_rows(arguments.a_format, arguments.b_format) || !has_block_kernels(a.data)) {
    return Tensor();
  }
  const Tensor out = empty(a.data, {a.data.size(0), b.data.size(0)}, dtype);
  return block_reduction_out({a, b, std::nullopt}, out, false) ? out : Tensor();
}

Tensor gemm_quantized(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                      std::string_view a_key, std::string_view b_key, at::ScalarType dtype,
                      const OptionalTensor& bias, bool transpose_b, const OptionalTensor& a_amax,
                      const OptionalTensor& b_amax) {
  const auto arguments =
      check_gemm_quantized(a, a_scale, b, b_scale, a_key, b_key, dtype, bias, transpose_b, a_amax, b_amax);
  const BelowAutograd guard;
  const Tensor product = block_product_of(arguments, dtype, bias, transpose_b);
  if (product.defined()) return product;
  const at::ScalarType exact = values_dtype(arguments.a, arguments.a_format, arguments.b, arguments.b_format);
  const Values left = values_of(arguments.a, arguments.a_format, nullptr, false, exact);
  const Values right = values_of(arguments.b, arguments.b_format, nullptr, false, exact);
  return dense_product(left.data, transpose_b ? transposed_view(right.data) : right.data, bias, dtype,
                       joint_factor(left, right));
}

}  // namespace

TORCH_LIBRARY_IMPL(transformer_plugin, CPU, m) { m.impl(kOp, gemm_quantized); }
TORCH_LIBRARY_IMPL(transformer_plugin, Meta, m) { m.impl(kOp, gemm_quantized_meta); }
// Not differentiable: results have no gradient.
TORCH_LIBRARY_IMPL(transformer_plugin, Autograd, m) { m.impl(kOp, torch::CppFunction::makeFallthrough()); }
#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin, CUDA, m) { m.impl(kOp, gemm_quantized); }
#endif

}  // namespace transformer_plugin::gemm
