// requantize_transposed: data that is quantized along its rows to data along its columns.
#include <torch/library.h>

#include "common/tensor.h"
#include "quantize/operand.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;
using Pair = std::tuple<Tensor, Tensor>;
using Key = c10::string_view;

Tensor values_of(const Tensor& data, const Tensor& scale_inv, Key format, at::ScalarType dtype,
                 const OptionalTensor& group_sizes) {
  using Dense = Tensor(const Tensor&, const Tensor&, Key, at::ScalarType, bool, const OptionalTensor&);
  using Grouped =
      Tensor(const Tensor&, const Tensor&, const Tensor&, Key, at::ScalarType, bool, const OptionalTensor&);
  static const auto dense = find_op<Dense>("dequantize");
  static const auto grouped = find_op<Grouped>("grouped_dequantize");
  return group_sizes ? grouped.call(data, scale_inv, *group_sizes, format, dtype, false, kNotGiven)
                     : dense.call(data, scale_inv, format, dtype, false, kNotGiven);
}

// The same for every backend, by the ops that it is made of. They check the arguments.
Pair requantize_transposed(const Tensor& data, const Tensor& scale_inv, Key format, at::ScalarType dtype,
                           const OptionalTensor& group_sizes) {
  using Dense = Pair(const Tensor&, Key, const OptionalTensor&, const OptionalTensor&);
  using Grouped = Pair(const Tensor&, const Tensor&, Key, const OptionalTensor&, const OptionalTensor&);
  static const auto dense = find_op<Dense>("quantize_transposed");
  static const auto grouped = find_op<Grouped>("grouped_quantize_transposed");
  const Format parsed = quantized_format("requantize_transposed", "format", format, !group_sizes);
  TP_CHECK_VALUE(!parsed.is_nv(), "requantize_transposed", "format", "fp8_tensor, fp8_block or mxfp8",
                 "'" << format << "'",
                 "Take both copies of nvfp4 from quantize_both: each is scaled by an amax of its own");
  const Tensor values = values_of(data, scale_inv, format, dtype, group_sizes);
  return group_sizes ? grouped.call(values, *group_sizes, format, kNotGiven, kNotGiven)
                     : dense.call(values, format, kNotGiven, kNotGiven);
}

}  // namespace

TORCH_LIBRARY_IMPL(transformer_plugin, CPU, m) { m.impl("requantize_transposed", requantize_transposed); }
TORCH_LIBRARY_IMPL(transformer_plugin, Meta, m) { m.impl("requantize_transposed", requantize_transposed); }

#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin, CUDA, m) { m.impl("requantize_transposed", requantize_transposed); }
#endif

TORCH_LIBRARY_IMPL(transformer_plugin, Autograd, m) {
  m.impl("requantize_transposed", torch::CppFunction::makeFallthrough());
}

}  // namespace transformer_plugin::quantize
