// requantize_transposed: data that is quantized along its rows to data along its columns.
#include "quantize/args/requantize_transposed.h"

#include <torch/library.h>

#include "common/autograd.h"
#include "common/tensor.h"
#include "quantize/ops/quantize_params.h"

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
  GivenTensors given;  // `amax` is that of the data, `amax_t` that of what it becomes

  Argument argument() const { return {kOp, "data", data}; }
  const Tensor* groups() const { return group_sizes ? &*group_sizes : nullptr; }
  Operand operand(const Format& format) const { return operand_of_data(data, format, false, groups()); }
};

// What the amaxes are of, in errors: the data holds its values rounded.
constexpr const char* kMade = "the matrix that was quantized";

// Amaxes and a seed, which nvfp4 alone takes: the scales of the others say all.
void check_extras(const Call& call, const Format& format) {
  if (format.is_nv()) {
    return check_given({call.argument(), call.operand(format), kMade}, format, call.key, {true, true},
                       call.given);
  }
  check_not_given(kOp, "amax", call.given.amax, call.key);
  check_not_given(kOp, "amax_t", call.given.amax_t, call.key);
  check_not_given(kOp, "seed", call.given.seed, call.key);
}

Format check_arguments(const Call& call) {
  const Format format = quantized_format(kOp, "format", call.key, !call.group_sizes);
  check_data(call.argument(), call.groups(), format);
  const Operand operand = call.operand(format);
  TP_CHECK_VALUE(operand.cols % format.block_size() == 0, kOp, "data",
                 "a last dimension that is a multiple of 32, the block of mxfp8", describe(call.data),
                 "Pass data as the quantize ops return it");
  check_block_rows(call.argument(), format, "Pad the matrix with zeros before it is quantized");
  check_scale({kOp, "scale_inv", call.scale_inv}, call.argument(), format,
              operand.scale_sizes(format, false));
  const bool known = call.dtype == at::kFloat || call.dtype == at::kBFloat16 || call.dtype == at::kHalf;
  TP_CHECK_TYPE(known, kOp, "dtype", "one of the dtypes float32, bfloat16, float16", dtype_name(call.dtype),
                "It is that of the values between the two formats");
  check_extras(call, format);
  return format;
}

Outputs make(const Call& call, const Format& format) {
  return make_outputs(call.data, call.operand(format), format, {false, true});
}

Pair meta(const Call& call) {
  const Outputs outputs = make(call, check_arguments(call));
  return {outputs.data_t, outputs.scale_t};
}

DequantizeArgs dequantize_args(const Tensor& data, const Tensor& scale, const Format& format,
                               const Layout& layout, at::ScalarType dtype) {
  return {static_cast<const uint8_t*>(data.const_data_ptr()),
          scale.const_data_ptr(),
          nullptr,
          layout,
          false,
          to_dtype(dtype),
          format.element,
          nullptr,
          1.0f / (nv_bound(nv_method(format)) * 6.0f),
          format.row_scaled};
}

void run_fp8(const DequantizeArgs& from, const Tensor& data, const Format& format, at::ScalarType dtype,
             const Outputs& outputs) {
  RequantizeArgs args{from, quantize_args(data, outputs, from.layout, format, Tensor())};
  args.to.input = nullptr;
  args.to.dtype = from.dtype;
  args.to.rule = scale_rule(format, dtype);
  if (data.is_cpu()) return requantize_transposed_cpu(args);
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(data);
  switch (format.family) {
    case FormatFamily::kFp8Tensor: return launch_turn_codes(args, scope.stream());
    case FormatFamily::kMxFp8: return launch_requantize_transposed_mx(args, scope.stream());
    default: return launch_requantize_transposed(args, scope.stream());
  }
#endif
}

void run_nv(const DequantizeArgs& from, const Tensor& data, const Format& format, const GivenTensors& given,
            const Outputs& outputs) {
  const Tensor amax = given.amax->contiguous();
  const GivenTensors to{given.amax_t, kNotGiven, given.seed};
  const NvArguments arguments(from.dtype, outputs, from.layout, format, to);
  RequantizeNvArgs args{from, arguments.get()};
  args.from.amax = amax.const_data_ptr<float>();
  if (data.is_cpu()) return requantize_transposed_cpu(args);
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(data);
  launch_requantize_transposed_nv(args, scope.stream());
#endif
}

Pair run(const Call& call) {
  const Format format = check_arguments(call);
  const Operand operand = call.operand(format);
  const GroupTables tables =
      group_tables(call.argument(), call.groups(), operand.rows.expect_int(), group_multiple(format, true));
  const Outputs outputs = make(call, format);
  // torch copies no E2M1.
  const Tensor data = (format.is_nv() ? call.data.view(at::kByte) : call.data).contiguous();
  const Tensor scale = call.scale_inv.contiguous();
  if (format.family == FormatFamily::kFp8Tensor) {
    const BelowAutograd guard;
    outputs.scale_t.copy_(scale);
  }
  const DequantizeArgs from =
      dequantize_args(data, scale, format, make_layout(operand, format, tables), call.dtype);
  format.is_nv() ? run_nv(from, data, format, call.given, outputs)
                 : run_fp8(from, data, format, call.dtype, outputs);
  return {outputs.data_t, outputs.scale_t};
}

using Given = const OptionalTensor&;

template <Pair (*run_op)(const Call&)>
Pair op(const Tensor& data, const Tensor& scale_inv, std::string_view key, at::ScalarType dtype,
        Given group_sizes, Given amax, Given amax_t, Given seed) {
  return run_op({data, scale_inv, key, dtype, group_sizes, {amax, amax_t, seed}});
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
