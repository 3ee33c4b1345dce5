// requantize_transposed: data that is quantized along its rows to data along its columns.
#include "quantize/requantize_transposed.h"

#include <torch/library.h>

#include "common/autograd.h"
#include "common/tensor.h"
#include "quantize/outputs.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;
using Pair = std::tuple<Tensor, Tensor>;

constexpr const char* kOp = "requantize_transposed";

struct Call {
  const Tensor& data;
  const Tensor& scale_inv;
  std::string_view key;
  at::ScalarType dtype;
  const OptionalTensor& group_sizes;

  Argument argument() const { return {kOp, "data", data}; }
  const Tensor* groups() const { return group_sizes ? &*group_sizes : nullptr; }
  Operand operand() const { return operand_of(data, false, groups()); }
};

Format check_arguments(const Call& call) {
  const Format format = quantized_format(kOp, "format", call.key, !call.group_sizes);
  TP_CHECK_VALUE(!format.is_nv(), kOp, "format", "fp8_tensor, fp8_block or mxfp8", "'" << call.key << "'",
                 "Take both copies of nvfp4 from quantize_both: each is scaled by an amax of its own");
  check_data(call.argument(), call.groups(), format);
  TP_CHECK_VALUE(call.data.sym_size(-1) % format.block_size() == 0, kOp, "data",
                 "a last dimension that is a multiple of 32, the block of mxfp8", describe(call.data),
                 "Pass data as the quantize ops return it");
  check_scale({kOp, "scale_inv", call.scale_inv}, call.argument(), format,
              call.operand().scale_sizes(format, false));
  const bool known = call.dtype == at::kFloat || call.dtype == at::kBFloat16 || call.dtype == at::kHalf;
  TP_CHECK_TYPE(known, kOp, "dtype", "one of the dtypes float32, bfloat16, float16", dtype_name(call.dtype),
                "It is that of the values between the two formats");
  return format;
}

Outputs make(const Call& call, const Format& format) {
  return make_outputs(call.data, call.operand(), format, {false, true});
}

Pair meta(const Call& call) {
  const Outputs outputs = make(call, check_arguments(call));
  return {outputs.data_t, outputs.scale_t};
}

RequantizeArgs requantize_args(const Call& call, const Tensor& data, const Tensor& scale,
                               const Format& format, const Outputs& outputs, const Layout& layout) {
  QuantizeArgs to = quantize_args(data, outputs, layout, format, Tensor());
  to.input = nullptr;
  to.dtype = to_dtype(call.dtype);
  to.rule = scale_rule(format, call.dtype);
  const DequantizeArgs from{static_cast<const uint8_t*>(data.const_data_ptr()),
                            scale.const_data_ptr(),
                            nullptr,
                            layout,
                            false,
                            to.dtype,
                            format.element,
                            nullptr,
                            0.0f,
                            false};
  return {from, to};
}

Pair run(const Call& call) {
  const Format format = check_arguments(call);
  const Operand operand = call.operand();
  const GroupTables tables = group_tables(call.argument(), call.groups(), operand.rows.expect_int());
  const Outputs outputs = make(call, format);
  const Tensor data = call.data.contiguous(), scale = call.scale_inv.contiguous();
  const bool turn = format.family == FormatFamily::kFp8Tensor;
  if (turn) {
    const BelowAutograd guard;
    outputs.scale_t.copy_(scale);
  }
  const RequantizeArgs args =
      requantize_args(call, data, scale, format, outputs, make_layout(operand, format, tables));
  if (data.is_cpu()) {
    requantize_transposed_cpu(args);
    return {outputs.data_t, outputs.scale_t};
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(data);
  const bool mx = format.family == FormatFamily::kMxFp8;
  const auto launch =
      turn ? launch_turn_codes : (mx ? launch_requantize_transposed_mx : launch_requantize_transposed);
  launch(args, scope.stream());
#endif
  return {outputs.data_t, outputs.scale_t};
}

template <Pair (*run_op)(const Call&)>
Pair op(const Tensor& data, const Tensor& scale_inv, std::string_view key, at::ScalarType dtype,
        const OptionalTensor& group_sizes) {
  return run_op({data, scale_inv, key, dtype, group_sizes});
}

}  // namespace

TORCH_LIBRARY_IMPL(transformer_plugin, CPU, m) { m.impl(kOp, op<run>); }
TORCH_LIBRARY_IMPL(transformer_plugin, Meta, m) { m.impl(kOp, op<meta>); }

#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin, CUDA, m) { m.impl(kOp, op<run>); }
#endif

// Rounding has no gradient.
TORCH_LIBRARY_IMPL(transformer_plugin, Autograd, m) { m.impl(kOp, torch::CppFunction::makeFallthrough()); }

}  // namespace transformer_plugin::quantize
