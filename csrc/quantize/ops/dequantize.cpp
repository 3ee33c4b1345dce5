// dequantize: data and scales back to values.
#include "quantize/args/dequantize.h"

#include "common/autograd.h"
#include "common/ops/quantize.h"
#include "common/register.h"
#include "common/tensor.h"
#include "quantize/ops/checks.h"
#include "quantize/ops/dequantize.h"
#include "quantize/ops/group_tables.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;
using Key = std::string_view;

constexpr const char* kOp = "dequantize";

struct DequantizeCall {
  const Tensor& data;
  const Tensor& scale_inv;
  Key key;
  at::ScalarType dtype;
  const Tensor* group_sizes;  // null unless grouped
  bool transposed;
  const OptionalTensor& amax;
  bool zero_tail = true;

  Argument argument() const { return {kOp, "data", data}; }
  MatrixShape shape(const Format& format) const {
    return shape_of_data(data, format, transposed, group_sizes);
  }
};

Format check_arguments(const DequantizeCall& call) {
  const Format format = quantized_format(kOp, "format", call.key, !call.group_sizes);
  check_group_columns(kOp, "transposed", format, call.transposed, call.group_sizes);
  const Argument data = call.argument();
  check_data(data, call.group_sizes, format, call.transposed);
  const MatrixShape shape = call.shape(format);
  check_scale({kOp, "scale_inv", call.scale_inv}, data, format, shape.scale_sizes(format, call.transposed));
  const bool known = call.dtype == at::kFloat || call.dtype == at::kBFloat16 || call.dtype == at::kHalf;
  TP_CHECK_TYPE(known, kOp, "dtype", "one of the dtypes float32, bfloat16, float16", dtype_name(call.dtype),
                "Convert the result with .to()");
  format.is_nv() ? check_amax(data, {"amax", call.amax, call.transposed, true}, call.key,
                              shape.amax_sizes(format, call.transposed))
                 : check_unused(kOp, "amax", call.amax, call.key);
  return format;
}

// The scales of rows as those of fp8_block: the scale of a row repeated for each of its blocks.
Tensor block_scales(const Tensor& scale, const MatrixShape& shape, bool transposed) {
  const BelowAutograd guard;
  Format blocks;
  blocks.family = FormatFamily::kFp8Block;
  const Tensor repeated = empty(scale, shape.scale_sizes(blocks, transposed), at::kFloat);
  repeated.narrow(-1, 0, scale.size(-1)).copy_(scale.unsqueeze(-2));
  return repeated;
}

// Into a new tensor, or into `output`: contiguous, with as many elements.
Tensor run_format(const DequantizeCall& call, const Format& format, const Tensor* amax, Tensor output = {}) {
  const MatrixShape shape = call.shape(format);
  const GroupTables tables = group_tables(call.argument(), call.group_sizes, shape.rows.expect_int(),
                                          group_multiple(format, call.transposed),
                                          group_use(format, call.transposed), call.zero_tail);
  if (!output.defined()) output = empty(call.data, shape.value_sizes(), call.dtype);
  if (output.numel() == 0) return output;  // an empty output may have more tiles than the grid can hold
  // torch cannot copy float4_e2m1fn_x2.
  const Tensor data = (format.is_nv() ? call.data.view(at::kByte) : call.data).contiguous();
  const Tensor scale = format.traits().has_row_scales ? block_scales(call.scale_inv, shape, call.transposed)
                                                      : call.scale_inv.contiguous();
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

Tensor dequantize(const Tensor& data, const Tensor& scale_inv, Key key, at::ScalarType dtype,
                  OptionalTensorArg group_sizes, bool transposed, OptionalTensorArg amax, bool zero_tail) {
  const DequantizeCall call{data,       scale_inv, key,      dtype, pointer_to(group_sizes),
                            transposed, amax,      zero_tail};
  const Format format = check_arguments(call);
  return run_format(call, format, pointer_to(amax));
}

Tensor dequantize_meta(const Tensor& data, const Tensor& scale_inv, Key key, at::ScalarType dtype,
                       OptionalTensorArg group_sizes, bool transposed, OptionalTensorArg amax,
                       bool zero_tail) {
  const DequantizeCall call{data,       scale_inv, key,      dtype, pointer_to(group_sizes),
                            transposed, amax,      zero_tail};
  const Format format = check_arguments(call);
  return empty(data, call.shape(format).value_sizes(), dtype);
}

}  // namespace

Tensor dequantize_without_amax(const Tensor& data, const Tensor& scale_inv, const Tensor* group_sizes,
                               const Format& format, at::ScalarType dtype, bool transposed) {
  return run_format({data, scale_inv, "", dtype, group_sizes, transposed, kNoTensor, false}, format, nullptr);
}

void dequantize_matrix(const Tensor& data, const Tensor& scale_inv, const OptionalTensor& amax,
                       const Format& format, int64_t matrix, const Tensor& values) {
  const Tensor matrix_data = data.narrow(0, matrix, 1), scale = scale_inv.narrow(0, matrix, 1);
  const OptionalTensor matrix_amax = amax ? OptionalTensor(amax->narrow(0, matrix, 1)) : std::nullopt;
  const DequantizeCall call{matrix_data, scale, "", values.scalar_type(), nullptr, false, matrix_amax};
  run_format(call, format, pointer_to(matrix_amax), values);
}

TP_IMPL_NO_GRADIENT(dequantize, dequantize, dequantize_meta);

}  // namespace transformer_plugin::quantize
