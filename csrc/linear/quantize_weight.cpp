// quantize_weight and quantize_weight_out: a weight rounded once for many calls of linear, grouped_linear and grouped_mlp,
// to what those would make of it in each.

#include "common/autograd.h"
#include "common/register.h"
#include "gemm/dispatch/checks.h"
#include "linear/nonfinite.h"
#include "linear/quantized_weight.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;

constexpr const char* kOp = "quantize_weight";
constexpr const char* kOutOp = "quantize_weight_out";

RoleFormats check_arguments(const Argument& weight, std::string_view input_format,
                            std::string_view weight_format, std::string_view grad_format) {
  const RoleFormats formats = role_formats(weight.op, input_format, weight_format, grad_format);
  check_unquantized_weight(weight, formats, rounds_weight_columns(weight.tensor, formats));
  return formats;
}

// What bf16 rounds to is a tensor of its own also where the weight is in bfloat16: no op returns its argument.
RoundedWeight round_apart(const Tensor& weight, const RoleFormats& formats) {
  if (formats.weight.family != FormatFamily::kBFloat16) return round_weight(weight, formats, true);
  const Tensor data = weight.to(at::kBFloat16, false, /*copy=*/true, at::MemoryFormat::Contiguous);
  if (marks_nonfinite(formats.weight_key)) data.mul_(nonfinite_mark(weight, std::nullopt));
  return {{data, Tensor(), Tensor()}, {}};
}

// Of every backend, and below autograd of a tracer: it must see the ops that this is made of, as their number depends
// on the device, which a tensor in a Meta kernel has lost.
std::vector<Tensor> quantize_weight(const Tensor& weight, std::string_view input_format,
                                    std::string_view weight_format, std::string_view grad_format) {
  const RoleFormats formats =
      check_arguments({kOp, "weight", weight}, input_format, weight_format, grad_format);
  const BelowAutograd guard;
  return as_list(round_apart(weight, formats), formats, rounds_weight_columns(weight, formats));
}

RoleFormats check_out(const Tensor& weight, std::string_view input_format, std::string_view weight_format,
                      std::string_view grad_format, at::TensorList out) {
  const Argument argument{kOutOp, "weight", weight};
  const RoleFormats formats = check_arguments(argument, input_format, weight_format, grad_format);
  check_quantized_weight("out", out, argument, formats);
  return formats;
}

void quantize_weight_out_meta(const Tensor& weight, std::string_view input_format,
                              std::string_view weight_format, std::string_view grad_format,
                              at::TensorList out) {
  check_out(weight, input_format, weight_format, grad_format, out);
}

// The buffers' autograd versions change: a backward that was promised what they held must raise.
void quantize_weight_out(const Tensor& weight, std::string_view input_format, std::string_view weight_format,
                         std::string_view grad_format, at::TensorList out) {
  const RoleFormats formats = check_out(weight, input_format, weight_format, grad_format, out);
  check_apart(kOutOp, "out", out, {{"weight", weight}});
  const BelowAutograd guard;
  round_weight_out(weight, formats, as_rounded_weight(out, formats, true));
  for (const Tensor& buffer : out) {
    if (!buffer.is_inference()) buffer.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace

// Rounding has no gradient: layers that take what it gives carry their own.
TP_IMPL(kOp, quantize_weight, quantize_weight, quantize_weight);
TP_IMPL_NO_GRADIENT(kOutOp, quantize_weight_out, quantize_weight_out_meta);

}  // namespace transformer_plugin::gemm
