#include "quantize/dequantize.h"

#include <torch/library.h>

#include "common/tensor.h"
#include "quantize/operand.h"

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

  Operand operand() const { return operand_of(data, transposed, group_sizes); }
};

Format check_arguments(const Arguments& a) {
  const Format format = quantized_format(a.op, "format", a.key, a.group_sizes == nullptr);
  const Argument data{a.op, "data", a.data};
  check_dtype(data, {element_dtype(format)});
  if (a.group_sizes) {
    check_dim(data, 2);
    check_group_sizes({a.op, "group_sizes", *a.group_sizes}, data);
  } else {
    TP_CHECK_VALUE(a.data.dim() == 2 || a.data.dim() == 3, a.op, "data", "2 or 3 dimensions",
                   describe(a.data), "Reshape it first");
  }
  check_scale({a.op, "scale_inv", a.scale_inv}, data, format, a.operand().scale_sizes(format, a.transposed));
  const bool known = a.dtype == at::kFloat || a.dtype == at::kBFloat16 || a.dtype == at::kHalf;
  TP_CHECK_TYPE(known, a.op, "dtype", "one of the dtypes float32, bfloat16, float16", dtype_name(a.dtype),
                "Convert the result with .to()");
  check_not_given(a.op, "amax", a.amax, a.key);
  return format;
}

Tensor meta(const Arguments& a) {
  check_arguments(a);
  return empty(a.data, a.operand().data_sizes(false), a.dtype);
}

Tensor run(const Arguments& a) {
  const Format format = check_arguments(a);
  const Operand operand = a.operand();
  const GroupTables tables = group_tables({a.op, "data", a.data}, a.group_sizes, operand.rows.expect_int());
  const Tensor output = empty(a.data, operand.data_sizes(false), a.dtype);
  const Tensor data = a.data.contiguous();
  const Tensor scale = a.scale_inv.contiguous();
  const DequantizeArgs args{static_cast<const uint8_t*>(data.const_data_ptr()),
                            scale.const_data_ptr(),
                            output.mutable_data_ptr(),
                            make_layout(operand, format, tables),
                            a.transposed,
                            to_dtype(a.dtype),
                            format.element};
  if (data.is_cpu()) {
    dequantize_cpu(args);
    return output;
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(data);
  launch_dequantize(args, scope.stream());
#endif
  return output;
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
