#include <torch/library.h>

#include "activation/swiglu_checks.h"
#include "common/tensor.h"
#include "quantize/args/swiglu_quantize.h"
#include "quantize/ops/fused.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;
using Result = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kOp = "swiglu_backward_quantize_both";

constexpr const char* kMade =
    "what swiglu_backward gave in earlier steps, or use swiglu_backward, and quantize its first result";
constexpr Directions kDirections{true, true};

struct Call {
  const Tensor& grad;
  const Tensor& input;
  const OptionalTensor& probs;
  const OptionalTensor& group_sizes;
  std::string_view key;
  GivenTensors given;

  Argument argument() const { return {kOp, "input", input}; }
  const Tensor* groups() const { return group_sizes ? &*group_sizes : nullptr; }
  Operand operand() const { return matrix_operand(input.sym_size(0), input.sym_size(1), group_sizes); }
};

Format check_arguments(const Call& call) {
  const Tensor& input = call.input;
  const Format format = quantized_format(kOp, "format", call.key, !call.group_sizes);
  activation::check_swiglu(kOp, input, call.probs);
  activation::check_swiglu_grad(kOp, call.grad, input);
  if (call.group_sizes) check_group_sizes({kOp, "group_sizes", *call.group_sizes}, call.argument());
  TP_CHECK_VALUE(input.sym_size(1) % (2 * kTile) == 0, kOp, "input",
                 "a last dimension that is a multiple of 256: two halves of whole tiles of 128",
                 describe(input), "Use swiglu_backward and quantize_both, which take any width");
  check_block_rows(call.argument(), format);
  check_walk(call.argument(), call.operand());
  check_given({call.argument(), call.operand(), kMade}, format, call.key, kDirections, call.given);
  return format;
}

struct Made {
  Outputs outputs;
  Tensor grad_probs;
  Result result() const { return {outputs.data, outputs.scale, outputs.data_t, outputs.scale_t, grad_probs}; }
};

Made make(const Call& call, const Format& format) {
  const c10::SymInt rows = call.probs ? call.input.sym_size(0) : c10::SymInt(0);
  return {make_outputs(call.input, call.operand(), format, kDirections),
          empty(call.input, {rows}, at::kFloat)};
}

Made meta(const Call& call) { return make(call, check_arguments(call)); }

void launch(const QuantizeArgs& args, const SwigluBackwardArgs& swiglu, void* stream) {
  const bool mx = args.layout.mode == ScaleMode::kMx;
  (mx ? launch_swiglu_backward_quantize_mx : launch_swiglu_backward_quantize)(args, swiglu, stream);
}
void launch(const NvArgs& args, const SwigluBackwardArgs& swiglu, void* stream) {
  launch_swiglu_backward_quantize_nv(args, swiglu, stream);
}

Made run(const Call& call) {
  const Format format = check_arguments(call);
  const GroupTables tables =
      group_tables(call.argument(), call.groups(), call.input.size(0), group_multiple(format, true));
  const Made made = make(call, format);
  const Tensor g = call.grad.contiguous();
  const Tensor x = call.input.contiguous();
  const bool has_probs = call.probs.has_value();
  const Tensor p = has_probs ? call.probs->contiguous() : Tensor();
  const int64_t rows = x.size(0), features = x.size(1) / 2, tiles = features / kTile;
  Tensor partial;
  if (has_probs) partial = tiles == 1 ? made.grad_probs : empty(x, {tiles, rows}, at::kFloat);
  const SwigluBackwardArgs swiglu{g.const_data_ptr(),
                                  x.const_data_ptr(),
                                  has_probs ? p.const_data_ptr<float>() : nullptr,
                                  nullptr,
                                  has_probs ? made.grad_probs.mutable_data_ptr<float>() : nullptr,
                                  has_probs ? partial.mutable_data_ptr<float>() : nullptr,
                                  rows,
                                  features,
                                  to_dtype(x.scalar_type())};
  with_arguments(x, made.outputs, make_layout(call.operand(), format, tables), format, call.given,
                 [&](const auto& args) {
                   if (x.is_cpu()) return swiglu_backward_quantize_cpu(args, swiglu);
#ifdef TRANSFORMER_PLUGIN_CUDA
                   const CudaScope scope(x);
                   launch(args, swiglu, scope.stream());
#endif
                 });
  return made;
}

template <Made (*run_op)(const Call&)>
Result op(const Tensor& grad, const Tensor& input, const OptionalTensor& probs,
          const OptionalTensor& group_sizes, std::string_view key, const OptionalTensor& amax,
          const OptionalTensor& amax_t, const OptionalTensor& seed) {
  return run_op({grad, input, probs, group_sizes, key, {amax, amax_t, seed}}).result();
}

}  // namespace

TORCH_LIBRARY_IMPL(transformer_plugin, CPU, m) { m.impl(kOp, op<run>); }
TORCH_LIBRARY_IMPL(transformer_plugin, Meta, m) { m.impl(kOp, op<meta>); }
// Not differentiable: results have no gradient.
TORCH_LIBRARY_IMPL(transformer_plugin, Autograd, m) { m.impl(kOp, torch::CppFunction::makeFallthrough()); }
#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin, CUDA, m) { m.impl(kOp, op<run>); }
#endif

}  // namespace transformer_plugin::quantize
