// quantize_weight and quantize_weight_out: quantize a weight once for many calls of linear, norm_linear, grouped_linear and
// grouped_mlp, with the bytes that each call would compute.

#include <ATen/ops/empty.h>

#include "common/autograd.h"
#include "common/ops/linear.h"
#include "common/register.h"
#include "gemm/dispatch/checks.h"
#include "linear/main_grad.h"
#include "linear/nonfinite.h"
#include "linear/quantized_weight.h"
#include "quantize/ops/checks.h"

namespace transformer_plugin::linear {

using namespace gemm;  // layers are made of its ops and checks
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "quantize_weight";
constexpr const char* kOutOp = "quantize_weight_out";

OperandFormats check_arguments(const WeightArgument& weight, std::string_view input_format,
                               std::string_view weight_format, std::string_view grad_format) {
  const OperandFormats formats = operand_formats(weight.op, input_format, weight_format, grad_format);
  const bool columns = !weight.tensors.empty() && quantizes_weight_columnwise(weight.first(), formats);
  check_unquantized_weight(weight, formats, columns);
  return formats;
}

// With the format bf16 a bfloat16 weight is copied, because no op may return its argument.
QuantizedWeight quantize_copy(const WeightArgument& weight, const OperandFormats& formats) {
  const at::TensorList tensors = weight.tensors;
  if (formats.weight.family != FormatFamily::kBFloat16)
    return quantize_weight_operand(tensors, formats, true);
  Tensor data;
  if (weight.is_list()) {
    data = at::empty_symint({weight.groups(), weight.rows(), weight.columns()},
                            weight.first().options().dtype(at::kBFloat16));
    copy_weight(tensors, data);
  } else {
    data = weight.first().to(at::kBFloat16, false, /*copy=*/true, at::MemoryFormat::Contiguous);
  }
  if (marks_nonfinite(formats.weight_key)) data.mul_(nonfinite_factor(tensors));
  return {{data, Tensor(), Tensor()}, {}};
}

// Registered for every backend as a composite: a tracer must see the quantize ops it calls, because their number depends on the
// device, which a Meta kernel does not know.
std::vector<Tensor> quantize_weight(at::TensorList weight, std::string_view input_format,
                                    std::string_view weight_format, std::string_view grad_format) {
  const WeightArgument argument{kOp, "weight", weight};
  const OperandFormats formats = check_arguments(argument, input_format, weight_format, grad_format);
  const BelowAutograd guard;
  return as_list(quantize_copy(argument, formats), formats, quantizes_weight_columnwise(weight[0], formats));
}

OperandFormats check_out(at::TensorList weight, std::string_view input_format, std::string_view weight_format,
                         std::string_view grad_format, at::TensorList out, const OptionalTensor& noop) {
  const WeightArgument argument{kOutOp, "weight", weight};
  const OperandFormats formats = check_arguments(argument, input_format, weight_format, grad_format);
  check_quantized_weight("out", out, argument, formats);
  if (noop) quantize::check_noop({kOutOp, "noop", *noop}, {kOutOp, "weight", weight[0]});
  return formats;
}

void quantize_weight_out_meta(at::TensorList weight, std::string_view input_format,
                              std::string_view weight_format, std::string_view grad_format,
                              at::TensorList out, const OptionalTensor& noop) {
  check_out(weight, input_format, weight_format, grad_format, out, noop);
}

// Bumps the versions of the buffers, so that a backward that saved their old content raises.
void quantize_weight_out(at::TensorList weight, std::string_view input_format, std::string_view weight_format,
                         std::string_view grad_format, at::TensorList out, const OptionalTensor& noop) {
  const OperandFormats formats = check_out(weight, input_format, weight_format, grad_format, out, noop);
  CallMemory memory(kOutOp);
  memory.written_entries("out", out);
  memory.read("weight", weight);
  memory.read("noop", noop);
  memory.check();
  const BelowAutograd guard;
  quantize_weight_operand_out(weight, formats, as_quantized_weight(out, formats, true), noop);
  for (const Tensor& buffer : out) mark_written(buffer);
}

}  // namespace

// Quantization has no gradient; the layers that take its result have their own.
TP_IMPL(quantize_weight, quantize_weight, quantize_weight, quantize_weight);
// For a list without a tensor, which torch has no other kernel for.
TP_IMPL_FOR(BackendSelect, quantize_weight, quantize_weight);
TP_IMPL_NO_GRADIENT(quantize_weight_out, quantize_weight_out, quantize_weight_out_meta);

}  // namespace transformer_plugin::linear
