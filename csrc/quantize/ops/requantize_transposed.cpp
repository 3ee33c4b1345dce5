// requantize_transposed: row-wise data to transposed data.
#include "quantize/args/requantize_transposed.h"

#include "common/autograd.h"
#include "common/ops/quantize.h"
#include "common/register.h"
#include "common/tensor.h"
#include "quantize/ops/quantize_params.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;
using Pair = std::tuple<Tensor, Tensor>;

constexpr const char* kOp = "requantize_transposed";

struct RequantizeCall {
  const Tensor& data;
  const Tensor& scale_inv;
  std::string_view key;
  at::ScalarType dtype;
  const OptionalTensor& group_sizes;
  QuantizeParams params;  // `amax` is that of the data, `amax_t` that of the new data

  Argument argument() const { return {kOp, "data", data}; }
  const Tensor* groups() const { return pointer_to(group_sizes); }
  MatrixShape shape(const Format& format) const { return shape_of_data(data, format, false, groups()); }
};

// For errors: the amaxes are of the original matrix, of which the data holds rounded values.
constexpr const char* kIntermediate = "the matrix that was quantized";

// Amaxes and a seed, which only nvfp4 takes: for other formats the scales suffice.
void check_extras(const RequantizeCall& call, const Format& format) {
  if (format.is_nv()) {
    return check_quantize_params({call.argument(), call.shape(format), kIntermediate}, format, call.key,
                                 {true, true}, call.params);
  }
  check_unused(kOp, "amax", call.params.amax, call.key);
  check_unused(kOp, "amax_t", call.params.amax_t, call.key);
  check_unused(kOp, "seed", call.params.seed, call.key);
}

Format check_arguments(const RequantizeCall& call) {
  const Format format = fused_format(kOp, "format", call.key, !call.group_sizes);
  check_data(call.argument(), call.groups(), format);
  const MatrixShape shape = call.shape(format);
  TP_CHECK_VALUE(shape.cols % format.block_size() == 0, kOp, "data",
                 "a last dimension that is a multiple of 32, the block of mxfp8", describe(call.data),
                 "Pass data as the quantize ops return it");
  check_block_rows(call.argument(), format, "Pad the matrix with zeros before it is quantized");
  check_scale({kOp, "scale_inv", call.scale_inv}, call.argument(), format, shape.scale_sizes(format, false));
  const bool known = call.dtype == at::kFloat || call.dtype == at::kBFloat16 || call.dtype == at::kHalf;
  TP_CHECK_TYPE(known, kOp, "dtype", "one of the dtypes float32, bfloat16, float16", dtype_name(call.dtype),
                "It is that of the values between the two formats");
  check_extras(call, format);
  return format;
}

Outputs make(const RequantizeCall& call, const Format& format) {
  return make_outputs(call.data, call.shape(format), format, {false, true});
}

Pair meta(const RequantizeCall& call) {
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
    case FormatFamily::kFp8Tensor: return launch_transpose_data(args, scope.stream());
    case FormatFamily::kMxFp8: return launch_requantize_transposed_mx(args, scope.stream());
    default: return launch_requantize_transposed(args, scope.stream());
  }
#endif
}

void run_nv(const DequantizeArgs& from, const Tensor& data, const Format& format,
            const QuantizeParams& params, const Outputs& outputs) {
  const Tensor amax = params.amax->contiguous();
  const QuantizeParams to{kNoTensor, params.amax_t, params.seed};
  const NvArgsOwner arguments(from.dtype, outputs, from.layout, format, to);
  RequantizeNvArgs args{from, arguments.get()};
  args.from.amax = amax.const_data_ptr<float>();
  if (data.is_cpu()) return requantize_transposed_cpu(args);
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(data);
  launch_requantize_transposed_nv(args, scope.stream());
#endif
}

Pair run(const RequantizeCall& call) {
  const Format format = check_arguments(call);
  const MatrixShape shape = call.shape(format);
  const GroupTables tables =
      group_tables(call.argument(), call.groups(), shape.rows.expect_int(), group_multiple(format, true));
  const Outputs outputs = make(call, format);
  // torch cannot copy float4_e2m1fn_x2.
  const Tensor data = (format.is_nv() ? call.data.view(at::kByte) : call.data).contiguous();
  const Tensor scale = call.scale_inv.contiguous();
  if (format.family == FormatFamily::kFp8Tensor) {
    const BelowAutograd guard;
    outputs.scale_t.copy_(scale);
  }
  const DequantizeArgs from =
      dequantize_args(data, scale, format, make_layout(shape, format, tables), call.dtype);
  format.is_nv() ? run_nv(from, data, format, call.params, outputs)
                 : run_fp8(from, data, format, call.dtype, outputs);
  return {outputs.data_t, outputs.scale_t};
}

template <Pair (*run_op)(const RequantizeCall&)>
Pair requantize_transposed(const Tensor& data, const Tensor& scale_inv, std::string_view key,
                           at::ScalarType dtype, OptionalTensorArg group_sizes, OptionalTensorArg amax,
                           OptionalTensorArg amax_t, OptionalTensorArg seed) {
  return run_op({data, scale_inv, key, dtype, group_sizes, {amax, amax_t, seed}});
}

}  // namespace

// Rounding has no gradient.
TP_IMPL_NO_GRADIENT(requantize_transposed, requantize_transposed<run>, requantize_transposed<meta>);

}  // namespace transformer_plugin::quantize
