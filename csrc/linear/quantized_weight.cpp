#include "linear/quantized_weight.h"

#include <string>

#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/quantized_operands.h"
#include "quantize/ops/checks.h"

namespace transformer_plugin::linear {

using namespace gemm;  // layers are made of its ops and checks
namespace {

using at::Tensor;
using quantize::SymSizes;

// The number of tensors of one direction.
size_t tensors_along_one(const Format& format) {
  if (format.family == FormatFamily::kBFloat16) return 1;
  return format.is_nv() ? 3 : 2;
}

struct Expected {
  at::ScalarType dtype;
  SymSizes sizes;
};

// What the list holds for one direction.
std::vector<Expected> expected_along(const WeightArgument& weight, const Format& format, bool columns) {
  quantize::MatrixShape operand = quantize::matrix_shape(weight.first(), false, nullptr);
  if (weight.is_list()) operand.matrices = weight.groups();
  if (format.family == FormatFamily::kBFloat16) return {{at::kBFloat16, operand.value_sizes()}};
  std::vector<Expected> expected{
      {quantize::element_dtype(format), operand.data_sizes(format, columns)},
      {quantize::scale_dtype(format), operand.scale_sizes(format, columns)},
  };
  if (format.is_nv()) expected.push_back({at::kFloat, operand.amax_sizes(format, columns)});
  return expected;
}

constexpr const char* kAdvice =
    "Make it with transformer_plugin.ops.quantize_weight, of this weight and these formats, on its device";

// Scales in E8M0 may come as bytes, see typed_scale.
void check_entry(const Argument& entry, const WeightArgument& weight, const Expected& expected) {
  const bool are_bytes = expected.dtype == at::kFloat8_e8m0fnu && entry.tensor.defined() &&
                         entry.tensor.scalar_type() == at::kByte;
  if (!are_bytes) check_dtype(entry, {expected.dtype});
  check_same_device(entry, {weight.op, weight.name, weight.first()});
  const Tensor& tensor = entry.tensor;
  const bool fits = tensor.dim() == static_cast<int64_t>(expected.sizes.size()) &&
                    tensor.sym_sizes() == c10::SymIntArrayRef(expected.sizes) && tensor.is_contiguous();
  TP_CHECK_VALUE(fits, entry.op, entry.name,
                 "a contiguous tensor of sizes " << c10::SymIntArrayRef(expected.sizes) << " for '"
                                                 << weight.name << "'",
                 describe(tensor) << " with strides " << tensor.sym_strides(), kAdvice);
  check_no_gradient(entry, "What is quantized has no gradient: detach it");
}

}  // namespace

void check_unquantized_weight(const WeightArgument& weight, const OperandFormats& formats, bool columns) {
  TP_CHECK_VALUE(!formats.unquantized(), weight.op, "weight_format", "a format that rounds the weight",
                 "'" << formats.weight_key << "'", "Multiply the weight without quantizing it");
  if (weight.tensors.size() != 1) check_list(weight.op, weight.name, weight.tensors);
  const std::string name = weight.first_name();
  quantize::check_matrix({weight.op, name.c_str(), weight.first()}, nullptr, formats.weight, columns);
}

void check_quantized_weight(const char* name, at::TensorList list, const WeightArgument& weight,
                            const OperandFormats& formats) {
  const size_t one = tensors_along_one(formats.weight);
  // Where both directions have the same values, one of them serves every product. The other is for kernels that need it.
  const bool either = formats.symmetric_weight();
  const std::string count = (either ? std::to_string(one) + " or " : "") + std::to_string(2 * one);
  TP_CHECK_VALUE(list.size() == 2 * one || (either && list.size() == one), weight.op, name,
                 count << " tensors, those of '" << formats.weight_key << "' along rows"
                       << (either ? ", and along columns or not" : " and along columns"),
                 list.size(), kAdvice);
  for (size_t i = 0; i < list.size(); i += one) {
    const std::vector<Expected> expected = expected_along(weight, formats.weight, i > 0);
    for (size_t j = 0; j < one; ++j) {
      const std::string entry = std::string(name) + "[" + std::to_string(i + j) + "]";
      check_entry({weight.op, entry.c_str(), list[i + j]}, weight, expected[j]);
    }
  }
}

void check_quantized_weight(const char* name, const OptionalList& given, const WeightArgument& weight,
                            const OperandFormats& formats) {
  if (!given) return;
  TP_CHECK_VALUE(!formats.unquantized(), weight.op, name,
                 "None with the format 'none', which rounds no weight", given->size() << " tensors",
                 "Leave it out");
  check_quantized_weight(name, *given, weight, formats);
}

std::vector<Tensor> as_list(const QuantizedWeight& weight, const OperandFormats& formats, bool columns) {
  const size_t one = tensors_along_one(formats.weight);
  std::vector<Tensor> list;
  const auto append = [&](const Quantized& values) {
    const Tensor parts[] = {values.data, values.scale, values.amax};
    list.insert(list.end(), parts, parts + one);
  };
  append(weight.forward);
  if (columns) append(weight.backward);
  return list;
}

QuantizedWeight as_quantized_weight(at::TensorList list, const OperandFormats& formats, bool backward) {
  const size_t one = tensors_along_one(formats.weight);
  const auto part = [&](size_t first) {
    return Quantized{list[first],
                     one > 1 ? quantize::typed_scale(list[first + 1], formats.weight) : Tensor(),
                     one > 2 ? list[first + 2] : Tensor(),
                     formats.weight,
                     formats.weight_key,
                     first > 0};
  };
  return {part(0), backward ? part(list.size() > one ? one : 0) : Quantized{}};
}

}  // namespace transformer_plugin::linear
