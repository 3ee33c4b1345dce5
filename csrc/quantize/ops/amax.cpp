// amax, amax_transposed, amax_both: the largest magnitudes that a format scales by, so that ranks can take the largest of
// theirs before they quantize.
#include "quantize/args/amax.h"

#include <torch/library.h>

#include "common/tensor.h"
#include "quantize/ops/operand.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;

struct Call {
  const char* op;
  const Tensor& input;
  c10::string_view key;
  const OptionalTensor& group_sizes;
  bool rowwise;
  bool transposed;

  Argument argument() const { return {op, "input", input}; }
  const Tensor* sizes() const { return group_sizes ? &*group_sizes : nullptr; }
  Operand operand() const { return operand_of(input, false, sizes()); }
};

struct Outputs {
  Tensor amax, amax_t;  // undefined in a direction that is not asked for
};

Format check_arguments(const Call& call) {
  const Format format = quantized_format(call.op, "format", call.key, !call.group_sizes);
  TP_CHECK_VALUE(takes_amax(format), call.op, "format",
                 "a format that scales by the largest magnitude of more than a block, fp8_tensor or nvfp4",
                 "'" << call.key << "'", "Other formats find their scales on the way");
  check_matrix(call.argument(), call.sizes(), format, call.transposed);
  return format;
}

Outputs make_outputs(const Call& call, const Operand& operand, const Format& format) {
  Outputs outputs;
  if (call.rowwise) outputs.amax = empty(call.input, operand.amax_sizes(format, false), at::kFloat);
  if (call.transposed) outputs.amax_t = empty(call.input, operand.amax_sizes(format, true), at::kFloat);
  return outputs;
}

Outputs meta(const Call& call) {
  const Format format = check_arguments(call);
  return make_outputs(call, call.operand(), format);
}

float* floats(const Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr; }

void launch(const AmaxArgs& args, const Tensor& input) {
  if (input.is_cpu()) return amax_cpu(args);
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(input);
  launch_amax(args, scope.stream());
#endif
}

Outputs run(const Call& call) {
  const Format format = check_arguments(call);
  const Operand operand = call.operand();
  const GroupTables tables = group_tables(call.argument(), call.sizes(), call.input.size(0),
                                          group_multiple(format, call.transposed));
  const Outputs outputs = make_outputs(call, operand, format);
  const Tensor x = call.input.contiguous();
  // One number for a matrix is the same in both directions, but for the transform of one of them.
  const bool shared = !format.row_scaled && !format.random_hadamard;
  launch({x.const_data_ptr(), floats(call.rowwise || !shared ? outputs.amax : outputs.amax_t),
          shared ? nullptr : floats(outputs.amax_t), make_layout(operand, format, tables),
          to_dtype(x.scalar_type()), format.row_scaled, format.random_hadamard},
         x);
  if (shared && call.rowwise && call.transposed) outputs.amax_t.copy_(outputs.amax);
  return outputs;
}

using Run = Outputs (*)(const Call&);

template <Run run_op>
void register_ops(torch::Library& m) {
  m.impl("amax", [](const Tensor& input, c10::string_view format, const OptionalTensor& group_sizes) {
    return run_op({"amax", input, format, group_sizes, true, false}).amax;
  });
  m.impl("amax_transposed",
         [](const Tensor& input, c10::string_view format, const OptionalTensor& group_sizes) {
           return run_op({"amax_transposed", input, format, group_sizes, false, true}).amax_t;
         });
  m.impl("amax_both",
         [](const Tensor& input, c10::string_view format,
            const OptionalTensor& group_sizes) -> std::tuple<Tensor, Tensor> {
           const Outputs o = run_op({"amax_both", input, format, group_sizes, true, true});
           return {o.amax, o.amax_t};
         });
}

}  // namespace

Tensor amax_of(const Tensor& input, const Layout& layout) {
  const Tensor amax = empty(input, {layout.tensor_scales()}, at::kFloat);
  launch({input.const_data_ptr(), amax.mutable_data_ptr<float>(), nullptr, layout,
          to_dtype(input.scalar_type()), false, false},
         input);
  return amax;
}

TORCH_LIBRARY_IMPL(transformer_plugin, CPU, m) { register_ops<run>(m); }
TORCH_LIBRARY_IMPL(transformer_plugin, Meta, m) { register_ops<meta>(m); }

#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin, CUDA, m) { register_ops<run>(m); }
#endif

// A largest magnitude is for scales, which have no gradient.
TORCH_LIBRARY_IMPL(transformer_plugin, Autograd, m) {
  for (const char* op : {"amax", "amax_transposed", "amax_both"}) {
    m.impl(op, torch::CppFunction::makeFallthrough());
  }
}

}  // namespace transformer_plugin::quantize
