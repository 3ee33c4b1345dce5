#include "quantize/args/dequantize.h"

#include <torch/library.h>

#include "common/tensor.h"
#include "quantize/ops/operand.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;

struct Arguments {
  const char* op;
  const Tensor& data;
  const Tensor& scale_inv;
  const Tensor* group_sizes;  // null unless grouped
  c10::string_view key;
  at::ScalarType dtype;
  bool transposed;
  const OptionalTensor& amax;

  Argument argument() const { return {op, "data", data}; }
  Operand operand(const Format& format) const {
    return operand_of_data(data, format, transposed, group_sizes);
  }
};

Format check_arguments(const Arguments& a) {
  const Format format = quantized_format(a.op, "format", a.key, a.group_sizes == nullptr);
  const Argument data = a.argument();
  check_data(data, a.group_sizes, format, a.transposed);
  const Operand operand = a.operand(format);
  check_scale({a.op, "scale_inv", a.scale_inv}, data, format, operand.scale_sizes(format, a.transposed));
  const bool known = a.dtype == at::kFloat || a.dtype == at::kBFloat16 || a.dtype == at::kHalf;
  TP_CHECK_TYPE(known, a.op, "dtype", "one of the dtypes float32, bfloat16, float16", dtype_name(a.dtype),
                "Convert the result with .to()");
  format.is_nv() ? check_amax(data, {"amax", a.amax, a.transposed, true}, a.key,
                              operand.amax_sizes(format, a.transposed))
                 : check_not_given(a.op, "amax", a.amax, a.key);
  return format;
}

Tensor meta(const Arguments& a) {
  const Format format = check_arguments(a);
  return empty(a.data, a.operand(format).value_sizes(), a.dtype);
}

// Into a new tensor, or a contiguous one of as many elements.
Tensor run_format(const Arguments& a, const Format& format, const Tensor* amax, Tensor output = {}) {
  const Operand operand = a.operand(format);
  const GroupTables tables =
      group_tables(a.argument(), a.group_sizes, operand.rows.expect_int(),
                   group_multiple(format, a.transposed), group_use(format, a.transposed));
  if (!output.defined()) output = empty(a.data, operand.value_sizes(), a.dtype);
  if (output.numel() == 0) return output;  // there may be more tiles of nothing than can be walked
  // torch copies no E2M1.
  const Tensor data = (format.is_nv() ? a.data.view(at::kByte) : a.data).contiguous();
  const Tensor scale = a.scale_inv.contiguous();
  const Tensor given = amax ? amax->contiguous() : Tensor();
  const float bound = format.four_over_six == FourOverSix::kNever ? 448.0f : 256.0f;
  const DequantizeArgs args{static_cast<const uint8_t*>(data.const_data_ptr()),
                            scale.const_data_ptr(),
                            output.mutable_data_ptr(),
                            make_layout(operand, format, tables),
                            a.transposed,
                            to_dtype(a.dtype),
                            format.element,
                            amax ? given.const_data_ptr<float>() : nullptr,
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

Tensor run(const Arguments& a) {
  const Format format = check_arguments(a);
  return run_format(a, format, a.amax ? &*a.amax : nullptr);
}

template <Tensor (*run_op)(const Arguments&)>
void register_ops(torch::Library& m) {
  m.impl("dequantize", [](const Tensor& data, const Tensor& scale_inv, c10::string_view format,
                          at::ScalarType dtype, bool transposed, const OptionalTensor& amax) {
    return run_op({"dequantize", data, scale_inv, nullptr, format, dtype, transposed, amax});
  });
  m.impl("grouped_dequantize", [](const Tensor& data, const Tensor& scale_inv, const Tensor& group_sizes,
                                  c10::string_view format, at::ScalarType dtype, bool transposed,
                                  const OptionalTensor& amax) {
    return run_op({"grouped_dequantize", data, scale_inv, &group_sizes, format, dtype, transposed, amax});
  });
}

}  // namespace

Tensor dequantize_without_amax(const Tensor& data, const Tensor& scale_inv, const Tensor* group_sizes,
                               const Format& format, at::ScalarType dtype, bool transposed) {
  const Arguments arguments{"dequantize", data, scale_inv, group_sizes, "", dtype, transposed, kNotGiven};
  return run_format(arguments, format, nullptr);
}

void dequantize_member(const Tensor& data, const Tensor& scale_inv, const OptionalTensor& amax,
                       const Format& format, int64_t member, const Tensor& values) {
  const Tensor codes = data.narrow(0, member, 1), scale = scale_inv.narrow(0, member, 1);
  const OptionalTensor given = amax ? OptionalTensor(amax->narrow(0, member, 1)) : std::nullopt;
  const Arguments arguments{"dequantize", codes, scale, nullptr, "", values.scalar_type(), false, given};
  run_format(arguments, format, given ? &*given : nullptr, values);
}

TORCH_LIBRARY_IMPL(transformer_plugin, CPU, m) { register_ops<run>(m); }
TORCH_LIBRARY_IMPL(transformer_plugin, Meta, m) { register_ops<meta>(m); }

#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin, CUDA, m) { register_ops<run>(m); }
#endif

TORCH_LIBRARY_IMPL(transformer_plugin, Autograd, m) {
  m.impl("dequantize", torch::CppFunction::makeFallthrough());
  m.impl("grouped_dequantize", torch::CppFunction::makeFallthrough());
}

}  // namespace transformer_plugin::quantize
