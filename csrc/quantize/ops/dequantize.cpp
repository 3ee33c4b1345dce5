// dequantize and grouped_dequantize.
#include "quantize/args/dequantize.h"

#include "common/register.h"
#include "common/tensor.h"
#include "quantize/ops/operand.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;

struct DequantizeCall {
  const char* op;
  const Tensor& data;
  const Tensor& scale_inv;
  const Tensor* group_sizes;  // null unless grouped
  c10::string_view key;
  at::ScalarType dtype;
  bool transposed;
  const OptionalTensor& amax;

  Argument argument() const { return {op, "data", data}; }
  MatrixShape shape(const Format& format) const {
    return shape_of_data(data, format, transposed, group_sizes);
  }
};

Format check_arguments(const DequantizeCall& call) {
  const Format format = quantized_format(call.op, "format", call.key, call.group_sizes == nullptr);
  const Argument data = call.argument();
  check_data(data, call.group_sizes, format, call.transposed);
  const MatrixShape shape = call.shape(format);
  check_scale({call.op, "scale_inv", call.scale_inv}, data, format,
              shape.scale_sizes(format, call.transposed));
  const bool known = call.dtype == at::kFloat || call.dtype == at::kBFloat16 || call.dtype == at::kHalf;
  TP_CHECK_TYPE(known, call.op, "dtype", "one of the dtypes float32, bfloat16, float16",
                dtype_name(call.dtype), "Convert the result with .to()");
  format.is_nv() ? check_amax(data, {"amax", call.amax, call.transposed, true}, call.key,
                              shape.amax_sizes(format, call.transposed))
                 : check_not_given(call.op, "amax", call.amax, call.key);
  return format;
}

Tensor meta(const DequantizeCall& call) {
  const Format format = check_arguments(call);
  return empty(call.data, call.shape(format).value_sizes(), call.dtype);
}

// Into a new tensor, or into `output`: contiguous, with as many elements.
Tensor run_format(const DequantizeCall& call, const Format& format, const Tensor* amax, Tensor output = {}) {
  const MatrixShape shape = call.shape(format);
  const GroupTables tables =
      group_tables(call.argument(), call.group_sizes, shape.rows.expect_int(),
                   group_multiple(format, call.transposed), group_use(format, call.transposed));
  if (!output.defined()) output = empty(call.data, shape.value_sizes(), call.dtype);
  if (output.numel() == 0) return output;  // an empty output may have more tiles than the grid can hold
  // torch cannot copy float4_e2m1fn_x2.
  const Tensor data = (format.is_nv() ? call.data.view(at::kByte) : call.data).contiguous();
  const Tensor scale = call.scale_inv.contiguous();
  const Tensor matrix_amax = amax ? amax->contiguous() : Tensor();
  const float bound = format.four_over_six == FourOverSix::kNever ? 448.0f : 256.0f;
  const DequantizeArgs args{static_cast<const uint8_t*>(data.const_data_ptr()),
                            scale.const_data_ptr(),
                            output.mutable_data_ptr(),
                            make_layout(shape, format, tables),
                            call.transposed,
                            to_dtype(call.dtype),
                            format.element,
                            amax ? matrix_amax.const_data_ptr<float>() : nullptr,
                            1.0f / (bound * 6.0f),
                            format.row_scaled};
  if (data.is_cpu()) {
    dequantize_cpu(args);
    return output;
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(data);
  format.is_nv() ? launch_dequantize_nv(args, scope.stream()) : launch_dequantize(args, scope.stream());
#endif
  return output;
}

Tensor run(const DequantizeCall& call) {
  const Format format = check_arguments(call);
  return run_format(call, format, call.amax ? &*call.amax : nullptr);
}

template <Tensor (*run_op)(const DequantizeCall&)>
Tensor dequantize(const Tensor& data, const Tensor& scale_inv, std::string_view format, at::ScalarType dtype,
                  bool transposed, OptionalTensorArg amax) {
  return run_op({"dequantize", data, scale_inv, nullptr, format, dtype, transposed, amax});
}

template <Tensor (*run_op)(const DequantizeCall&)>
Tensor grouped_dequantize(const Tensor& data, const Tensor& scale_inv, const Tensor& group_sizes,
                          std::string_view format, at::ScalarType dtype, bool transposed,
                          OptionalTensorArg amax) {
  return run_op({"grouped_dequantize", data, scale_inv, &group_sizes, format, dtype, transposed, amax});
}

}  // namespace

Tensor dequantize_without_amax(const Tensor& data, const Tensor& scale_inv, const Tensor* group_sizes,
                               const Format& format, at::ScalarType dtype, bool transposed) {
  const DequantizeCall call{"dequantize", data, scale_inv, group_sizes, "", dtype, transposed, kNotGiven};
  return run_format(call, format, nullptr);
}

void dequantize_matrix(const Tensor& data, const Tensor& scale_inv, const OptionalTensor& amax,
                       const Format& format, int64_t matrix, const Tensor& values) {
  const Tensor matrix_data = data.narrow(0, matrix, 1), scale = scale_inv.narrow(0, matrix, 1);
  const OptionalTensor matrix_amax = amax ? OptionalTensor(amax->narrow(0, matrix, 1)) : std::nullopt;
  const DequantizeCall call{"dequantize", matrix_data,          scale, nullptr,
                            "",           values.scalar_type(), false, matrix_amax};
  run_format(call, format, matrix_amax ? &*matrix_amax : nullptr, values);
}

TP_IMPL_NO_GRADIENT("dequantize", dequantize<run>, dequantize<meta>);
TP_IMPL_NO_GRADIENT("grouped_dequantize", grouped_dequantize<run>, grouped_dequantize<meta>);

}  // namespace transformer_plugin::quantize
