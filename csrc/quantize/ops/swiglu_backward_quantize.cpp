// swiglu_backward_quantize: the backward of SwiGLU, quantized in both directions.
#include "activation/swiglu_checks.h"
#include "common/ops/quantize.h"
#include "common/register.h"
#include "common/tensor.h"
#include "quantize/args/swiglu_quantize.h"
#include "quantize/ops/fused.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;

constexpr const char* kOp = "swiglu_backward_quantize";

constexpr const char* kIntermediate =
    "what swiglu_backward gave in earlier steps, or use swiglu_backward, and quantize its first result";
constexpr Directions kDirections{true, true};

struct SwigluBackwardCall {
  const Tensor& grad;
  const Tensor& input;
  std::string_view key;
  const OptionalTensor& probs;
  const OptionalTensor& group_sizes;
  QuantizeParams params;
  bool zero_tail;

  Argument argument() const { return {kOp, "input", input}; }
  const Tensor* groups() const { return pointer_to(group_sizes); }
  MatrixShape shape() const { return matrix_shape(input.sym_size(0), input.sym_size(1), group_sizes); }
};

Format check_arguments(const SwigluBackwardCall& call) {
  const Tensor& input = call.input;
  const Format format = fused_format(kOp, "format", call.key, !call.group_sizes);
  activation::check_swiglu(kOp, input, call.probs);
  activation::check_swiglu_grad(kOp, call.grad, input);
  if (call.group_sizes) check_group_sizes({kOp, "group_sizes", *call.group_sizes}, call.argument());
  TP_CHECK_VALUE(input.sym_size(1) % (2 * kTile) == 0, kOp, "input",
                 "a last dimension that is a multiple of 256: two halves of whole tiles of 128",
                 describe(input), "Use swiglu_backward and quantize, which take any width");
  check_block_rows(call.argument(), format);
  check_tile_count(call.argument(), call.shape());
  check_quantize_params({call.argument(), call.shape(), kIntermediate}, format, call.key, kDirections,
                        call.params);
  return format;
}

struct SwigluBackwardResult {
  Outputs outputs;
  Tensor grad_probs;

  Tensors list() && {
    Tensors list = as_list(std::move(outputs));
    list.push_back(std::move(grad_probs));
    return list;
  }
};

SwigluBackwardResult make(const SwigluBackwardCall& call, const Format& format) {
  const c10::SymInt rows = call.probs ? call.input.sym_size(0) : c10::SymInt(0);
  return {make_outputs(call.input, call.shape(), format, kDirections), empty(call.input, {rows}, at::kFloat)};
}

void launch(const QuantizeArgs& args, const SwigluBackwardArgs& swiglu, void* stream) {
  const bool mx = args.layout.granularity == ScaleGranularity::k1x32;
  (mx ? launch_swiglu_backward_quantize_mx : launch_swiglu_backward_quantize)(args, swiglu, stream);
}
void launch(const NvArgs& args, const SwigluBackwardArgs& swiglu, void* stream) {
  launch_swiglu_backward_quantize_nv(args, swiglu, stream);
}

SwigluBackwardResult run(const SwigluBackwardCall& call) {
  const Format format = check_arguments(call);
  const GroupTables tables = group_tables(call.argument(), call.groups(), call.input.size(0),
                                          group_multiple(format, true), GroupUse::kEach, call.zero_tail);
  SwigluBackwardResult result = make(call, format);
  const Tensor g = call.grad.contiguous();
  const Tensor x = call.input.contiguous();
  const bool has_probs = call.probs.has_value();
  const Tensor p = has_probs ? call.probs->contiguous() : Tensor();
  const int64_t rows = x.size(0), features = x.size(1) / 2, tiles = features / kTile;
  Tensor partial;
  // The kernels leave out the tail of `partial` with that of the data.
  const int32_t* end = tables.with_tail ? nullptr : tables.offsets + tables.groups;
  const bool is_result = tiles == 1 && !end;
  if (has_probs) partial = is_result ? result.grad_probs : empty(x, {tiles, rows}, at::kFloat);
  const SwigluBackwardArgs swiglu{g.const_data_ptr(),
                                  x.const_data_ptr(),
                                  has_probs ? p.const_data_ptr<float>() : nullptr,
                                  nullptr,
                                  has_probs ? result.grad_probs.mutable_data_ptr<float>() : nullptr,
                                  has_probs ? partial.mutable_data_ptr<float>() : nullptr,
                                  rows,
                                  features,
                                  to_dtype(x.scalar_type()),
                                  end};
  visit_quantize_args(x, result.outputs, make_layout(call.shape(), format, tables), format, call.params,
                      [&](const auto& args) {
                        if (x.is_cpu()) return swiglu_backward_quantize_cpu(args, swiglu);
#ifdef TRANSFORMER_PLUGIN_CUDA
                        const CudaScope scope(x);
                        launch(args, swiglu, scope.stream());
#endif
                      });
  return result;
}

Tensors swiglu_backward_quantize(const Tensor& grad, const Tensor& input, std::string_view key,
                                 OptionalTensorArg probs, OptionalTensorArg group_sizes,
                                 OptionalTensorArg amax, OptionalTensorArg amax_t, OptionalTensorArg seed,
                                 bool zero_tail) {
  return run({grad, input, key, probs, group_sizes, {amax, amax_t, seed}, zero_tail}).list();
}

Tensors swiglu_backward_quantize_meta(const Tensor& grad, const Tensor& input, std::string_view key,
                                      OptionalTensorArg probs, OptionalTensorArg group_sizes,
                                      OptionalTensorArg amax, OptionalTensorArg amax_t,
                                      OptionalTensorArg seed, bool zero_tail) {
  const SwigluBackwardCall call{grad, input, key, probs, group_sizes, {amax, amax_t, seed}, zero_tail};
  return make(call, check_arguments(call)).list();
}

}  // namespace

// Not differentiable: the results are themselves gradients.
TP_IMPL_NO_GRADIENT(swiglu_backward_quantize, swiglu_backward_quantize, swiglu_backward_quantize_meta);

}  // namespace transformer_plugin::quantize
