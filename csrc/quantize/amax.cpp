// amax, amax_transposed, amax_both: the largest magnitudes that a format scales by, so that ranks can take the largest of
// theirs before they quantize.
#include "quantize/amax.h"

#include <ATen/ops/clone.h>
#include <torch/library.h>

#include "common/tensor.h"
#include "quantize/operand.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;

struct Call {
  const char* op;
  const Tensor& input;
  c10::string_view key;
  const OptionalTensor& group_sizes;

  Argument argument() const { return {op, "input", input}; }
  const Tensor* sizes() const { return group_sizes ? &*group_sizes : nullptr; }
  Operand operand() const { return operand_of(input, false, sizes()); }
};

Format check_arguments(const Call& call) {
  const Format format = quantized_format(call.op, "format", call.key, !call.group_sizes);
  TP_CHECK_VALUE(takes_amax(format), call.op, "format",
                 "a format that scales by the largest magnitude of more than a block, fp8_tensor",
                 "'" << call.key << "'", "Other formats find their scales on the way");
  check_matrix(call.argument(), call.sizes(), format);
  return format;
}

Tensor meta(const Call& call) {
  const Format format = check_arguments(call);
  return empty(call.input, call.operand().amax_sizes(format, false), at::kFloat);
}

Tensor run(const Call& call) {
  const Format format = check_arguments(call);
  const GroupTables tables = group_tables(call.argument(), call.sizes(), call.input.size(0));
  return amax_of(call.input.contiguous(), make_layout(call.operand(), format, tables));
}

using Run = Tensor (*)(const Call&);

template <Run run_op>
void register_ops(torch::Library& m) {
  m.impl("amax", [](const Tensor& input, c10::string_view format, const OptionalTensor& group_sizes) {
    return run_op({"amax", input, format, group_sizes});
  });
  m.impl("amax_transposed",
         [](const Tensor& input, c10::string_view format, const OptionalTensor& group_sizes) {
           return run_op({"amax_transposed", input, format, group_sizes});
         });
  m.impl("amax_both",
         [](const Tensor& input, c10::string_view format,
            const OptionalTensor& group_sizes) -> std::tuple<Tensor, Tensor> {
           const Tensor amax = run_op({"amax_both", input, format, group_sizes});
           return {amax, at::clone(amax)};
         });
}

}  // namespace

Tensor amax_of(const Tensor& input, const Layout& layout) {
  const Tensor amax = empty(input, {layout.tensor_scales()}, at::kFloat);
  const AmaxArgs args{input.const_data_ptr(), amax.mutable_data_ptr<float>(), layout,
                      to_dtype(input.scalar_type())};
  if (input.is_cpu()) {
    amax_cpu(args);
    return amax;
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(input);
  launch_amax(args, scope.stream());
#endif
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
