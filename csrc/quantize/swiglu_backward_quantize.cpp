#include <torch/library.h>

#include "activation/swiglu_checks.h"
#include "common/tensor.h"
#include "quantize/fused.h"
#include "quantize/swiglu_quantize.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;
using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kOp = "swiglu_backward_quantize_both";

Format check_arguments(const Tensor& grad, const Tensor& input, const OptionalTensor& probs,
                       const OptionalTensor& group_sizes, std::string_view key) {
  const Format format =
      block_format(kOp, key, group_sizes, "Use swiglu_backward, and quantize its first result");
  activation::check_swiglu(kOp, input, probs);
  activation::check_swiglu_grad(kOp, grad, input);
  if (group_sizes) check_group_sizes({kOp, "group_sizes", *group_sizes}, {kOp, "input", input});
  TP_CHECK_VALUE(input.sym_size(1) % (2 * kTile) == 0, kOp, "input",
                 "a last dimension that is a multiple of 256: two halves of whole tiles of 128",
                 describe(input), "Use swiglu_backward and quantize_both, which take any width");
  return format;
}

struct Made {
  Outputs outputs;
  Tensor grad_probs;
  Result result() const { return {outputs.data, outputs.scale, outputs.data_t, outputs.scale_t, grad_probs}; }
};

Made make(const Tensor& input, const OptionalTensor& probs, const Operand& operand, const Format& format) {
  const c10::SymInt rows = probs ? input.sym_size(0) : c10::SymInt(0);
  return {make_outputs(input, operand, format, {true, true}), empty(input, {rows}, at::kFloat)};
}

Result meta(const Tensor& grad, const Tensor& input, const OptionalTensor& probs,
            const OptionalTensor& group_sizes, std::string_view key) {
  const Format format = check_arguments(grad, input, probs, group_sizes, key);
  return make(input, probs, matrix_operand(input.sym_size(0), input.sym_size(1), group_sizes), format)
      .result();
}

Result run(const Tensor& grad, const Tensor& input, const OptionalTensor& probs,
           const OptionalTensor& group_sizes, std::string_view key) {
  const Format format = check_arguments(grad, input, probs, group_sizes, key);
  const Operand operand = matrix_operand(input.sym_size(0), input.sym_size(1), group_sizes);
  const GroupTables tables =
      group_tables({kOp, "input", input}, group_sizes ? &*group_sizes : nullptr, input.size(0));
  const Made made = make(input, probs, operand, format);
  const Tensor g = grad.contiguous();
  const Tensor x = input.contiguous();
  const Tensor p = probs ? probs->contiguous() : Tensor();
  const int64_t rows = x.size(0), features = x.size(1) / 2;
  const Tensor partial = probs ? empty(x, {features / kTile, rows}, at::kFloat) : Tensor();
  const QuantizeArgs args =
      quantize_args(x, made.outputs, make_layout(operand, format, tables), format, Tensor());
  const SwigluBackwardArgs swiglu{g.const_data_ptr(),
                                  x.const_data_ptr(),
                                  probs ? p.const_data_ptr<float>() : nullptr,
                                  nullptr,
                                  probs ? made.grad_probs.mutable_data_ptr<float>() : nullptr,
                                  probs ? partial.mutable_data_ptr<float>() : nullptr,
                                  rows,
                                  features,
                                  args.dtype};
  if (input.is_cpu()) {
    swiglu_backward_quantize_cpu(args, swiglu);
    return made.result();
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(input);
  const bool mx = format.family == FormatFamily::kMxFp8;
  (mx ? launch_swiglu_backward_quantize_mx : launch_swiglu_backward_quantize)(args, swiglu, scope.stream());
#endif
  return made.result();
}

}  // namespace

TORCH_LIBRARY_IMPL(transformer_plugin, CPU, m) { m.impl(kOp, run); }
TORCH_LIBRARY_IMPL(transformer_plugin, Meta, m) { m.impl(kOp, meta); }
// Not differentiable: results have no gradient.
TORCH_LIBRARY_IMPL(transformer_plugin, Autograd, m) { m.impl(kOp, torch::CppFunction::makeFallthrough()); }
#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin, CUDA, m) { m.impl(kOp, run); }
#endif

}  // namespace transformer_plugin::quantize
