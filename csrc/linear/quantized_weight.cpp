#include "linear/quantized_weight.h"

#include <string>

#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/quantized_operands.h"
#include "linear/main_grad.h"
#include "quantize/ops/checks.h"
#include "sharded/foreign_weight.h"
#include "sharded/gather_weight.h"

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
  TP_CHECK_VALUE(!formats.native(), weight.op, "weight_format", "a format that rounds the weight",
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
  TP_CHECK_VALUE(!formats.native(), weight.op, name, "None with the format 'none', which rounds no weight",
                 given->size() << " tensors", "Leave it out");
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

QuantizedWeight weight_operand(at::TensorList weight, const OptionalList& quantized,
                               const OperandFormats& formats, bool backward) {
  return quantized ? as_quantized_weight(*quantized, formats, backward)
                   : quantize_weight_operand(weight, formats, backward);
}

namespace {

// The weight that another runtime gathers now, in one direction.
Quantized foreign_operand(at::TensorList shards, const sharded::WeightShard& shard,
                          const OperandFormats& formats, bool backward, std::vector<Tensor>& matrices) {
  sharded::ForeignWeight made = sharded::foreign_weight(shards, shard, formats.weight_key, backward);
  if (made.quantized.empty()) {
    QuantizedWeight weight = quantize_weight_operand(made.values, formats, backward);
    matrices = std::move(weight.matrices);
    return backward ? weight.backward : weight.forward;
  }
  made.quantized.resize(3);
  return {made.quantized[0],  quantize::typed_scale(made.quantized[1], formats.weight),
          made.quantized[2],  formats.weight,
          formats.weight_key, made.columnwise};
}

}  // namespace

// The ranks' quantized parts travel, or, where there are none, the values, which are quantized after the gather.
QuantizedWeight gathered_operand(at::TensorList weight, const OptionalList& quantized,
                                 const OperandFormats& formats, bool backward,
                                 const sharded::WeightShard& shard) {
  if (!shard.is_cut()) return weight_operand(weight, quantized, formats, backward);
  if (shard.is_foreign()) {
    QuantizedWeight result;
    result.forward = foreign_operand(weight, shard, formats, false, result.matrices);
    if (backward) result.backward = {weight[0], Tensor(), Tensor()};
    if (backward && shard.each) result.parts = weight.vec();
    return result;
  }
  if (shard.each) {
    const Tensor whole = sharded::gather_weight_list(weight, shard, false);
    QuantizedWeight result = quantize_weight_operand(whole, formats, false);
    if (backward) result.parts = weight.vec();
    return result;
  }
  if (quantized || !formats.weight.is_quantized()) {
    QuantizedWeight own = weight_operand(weight, quantized, formats, backward);
    own.forward = sharded::gather_weight(own.forward, shard, false);
    return own;
  }
  const Quantized values{weight[0], Tensor(), Tensor()};
  const Tensor whole = sharded::gather_values(values.data, shard, false);
  return {quantize_weight_operand(whole, formats, false).forward, backward ? values : Quantized{}};
}

Quantized whole_in_backward(const sharded::WeightShard& shard, const Quantized& saved,
                            const OperandFormats& formats) {
  std::vector<Tensor> matrices;
  at::TensorList none;
  return whole_in_backward(shard, saved, formats, none, matrices);
}

Quantized whole_in_backward(const sharded::WeightShard& shard, const Quantized& saved,
                            const OperandFormats& formats, at::TensorList& matrices,
                            std::vector<Tensor>& gathered) {
  if (!shard.is_cut()) return saved;
  if (shard.is_foreign()) {
    const Quantized whole =
        foreign_operand(shard.each ? matrices : saved.data, shard, formats, true, gathered);
    matrices = gathered;
    return whole;
  }
  if (shard.each) {
    const Tensor whole = sharded::gather_weight_list(matrices, shard, true);
    matrices = {};
    return quantize_weight_operand(whole, formats, true).backward;
  }
  const Quantized whole = sharded::gather_weight(saved, shard, true);
  if (whole.scale.defined() || !formats.weight.is_quantized()) return whole;
  return quantize_weight_operand(whole.data, formats, true).backward;
}

void announce_foreign_use(torch::autograd::AutogradContext* ctx, const char* main_grad,
                          const sharded::WeightShard& shard) {
  if (!shard.is_foreign()) return;
  const std::string name = std::string(main_grad) + "_weight";
  if (ctx->saved_data.find(name) == ctx->saved_data.end()) return;
  std::vector<Tensor> shards = saved_matrices(ctx, name.c_str());
  if (shards.empty()) shards.push_back(ctx->saved_data[name].toTensor());
  sharded::foreign_weight(shards, shard, "none", true);
}

}  // namespace transformer_plugin::linear
