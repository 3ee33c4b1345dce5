// amax, amax_transposed, amax_both: the largest magnitudes that a format scales by, so that ranks can
// exchange them before they quantize.
#include "quantize/args/amax.h"

#include "common/register.h"
#include "common/tensor.h"
#include "quantize/ops/operand.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;

struct AmaxCall {
  const char* op;
  const Tensor& input;
  c10::string_view key;
  const OptionalTensor& group_sizes;
  bool rowwise;
  bool transposed;

  Argument argument() const { return {op, "input", input}; }
  const Tensor* sizes() const { return group_sizes ? &*group_sizes : nullptr; }
  MatrixShape shape() const { return matrix_shape(input, false, sizes()); }
};

struct AmaxOutputs {
  Tensor amax, amax_t;  // undefined in a direction that is not requested
};

Format check_arguments(const AmaxCall& call) {
  const Format format = quantized_format(call.op, "format", call.key, !call.group_sizes);
  TP_CHECK_VALUE(takes_amax(format), call.op, "format",
                 "a format that scales by the largest magnitude of more than a block, fp8_tensor or nvfp4",
                 "'" << call.key << "'", "Other formats find their scales on the way");
  check_matrix(call.argument(), call.sizes(), format, call.transposed);
  return format;
}

AmaxOutputs make_outputs(const AmaxCall& call, const MatrixShape& shape, const Format& format) {
  AmaxOutputs outputs;
  if (call.rowwise) outputs.amax = empty(call.input, shape.amax_sizes(format, false), at::kFloat);
  if (call.transposed) outputs.amax_t = empty(call.input, shape.amax_sizes(format, true), at::kFloat);
  return outputs;
}

AmaxOutputs meta(const AmaxCall& call) {
  const Format format = check_arguments(call);
  return make_outputs(call, call.shape(), format);
}

float* floats(const Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr; }

void launch(const AmaxArgs& args, const Tensor& input) {
  if (input.is_cpu()) return amax_cpu(args);
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(input);
  launch_amax(args, scope.stream());
#endif
}

AmaxOutputs run(const AmaxCall& call) {
  const Format format = check_arguments(call);
  const MatrixShape shape = call.shape();
  const GroupTables tables = group_tables(call.argument(), call.sizes(), call.input.size(0),
                                          group_multiple(format, call.transposed));
  const AmaxOutputs outputs = make_outputs(call, shape, format);
  const Tensor x = call.input.contiguous();
  // A per-tensor amax is the same in both directions, unless one of them is transformed.
  const bool shared = !format.row_scaled && !format.random_hadamard;
  launch({x.const_data_ptr(), floats(call.rowwise || !shared ? outputs.amax : outputs.amax_t),
          shared ? nullptr : floats(outputs.amax_t), make_layout(shape, format, tables),
          to_dtype(x.scalar_type()), format.row_scaled, format.random_hadamard},
         x);
  if (shared && call.rowwise && call.transposed) outputs.amax_t.copy_(outputs.amax);
  return outputs;
}

template <AmaxOutputs (*run_op)(const AmaxCall&)>
Tensor amax(const Tensor& input, std::string_view format, OptionalTensorArg group_sizes) {
  return run_op({"amax", input, format, group_sizes, true, false}).amax;
}

template <AmaxOutputs (*run_op)(const AmaxCall&)>
Tensor amax_transposed(const Tensor& input, std::string_view format, OptionalTensorArg group_sizes) {
  return run_op({"amax_transposed", input, format, group_sizes, false, true}).amax_t;
}

template <AmaxOutputs (*run_op)(const AmaxCall&)>
std::tuple<Tensor, Tensor> amax_both(const Tensor& input, std::string_view format,
                                     OptionalTensorArg group_sizes) {
  const AmaxOutputs o = run_op({"amax_both", input, format, group_sizes, true, true});
  return {o.amax, o.amax_t};
}

}  // namespace

Tensor amax_of(const Tensor& input, const Layout& layout) {
  const Tensor amax = empty(input, {layout.tensor_scales()}, at::kFloat);
  launch({input.const_data_ptr(), amax.mutable_data_ptr<float>(), nullptr, layout,
          to_dtype(input.scalar_type()), false, false},
         input);
  return amax;
}

// An amax is used for scales, which have no gradient.
TP_IMPL_NO_GRADIENT("amax", amax<run>, amax<meta>);
TP_IMPL_NO_GRADIENT("amax_transposed", amax_transposed<run>, amax_transposed<meta>);
TP_IMPL_NO_GRADIENT("amax_both", amax_both<run>, amax_both<meta>);

}  // namespace transformer_plugin::quantize
