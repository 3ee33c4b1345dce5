// activation_backward_quantize: the backward of an activation with a gate, quantized in both directions.
#include "activation/activation_checks.h"
#include "common/ops/quantize.h"
#include "common/register.h"
#include "common/tensor.h"
#include "quantize/args/activation_quantize.h"
#include "quantize/ops/fused.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;

constexpr const char* kOp = "activation_backward_quantize";

constexpr const char* kIntermediate =
    "what activation_backward gave in earlier steps, or use activation_backward, and quantize its first result";
constexpr Directions kDirections{true, true};

struct ActivationBackwardCall {
  const Tensor& grad;
  const Tensor& input;
  std::string_view key;
  const OptionalTensor& probs;
  const OptionalTensor& group_sizes;
  QuantizeParams params;
  bool zero_tail;
  std::string_view activation_key;

  Argument argument() const { return {kOp, "input", input}; }
  const Tensor* groups() const { return pointer_to(group_sizes); }
  MatrixShape shape() const { return matrix_shape(input.sym_size(0), input.sym_size(1), group_sizes); }
};

Format check_arguments(const ActivationBackwardCall& call) {
  const Tensor& input = call.input;
  const activation::NamedActivation activation = activation::parse_activation(kOp, call.activation_key);
  activation::check_fused_quantize(kOp, "activation_backward", activation);
  const Format format = fused_format(kOp, "format", call.key, !call.group_sizes);
  activation::check_activation(kOp, input, call.probs, activation);
  activation::check_activation_grad(kOp, call.grad, input, activation);
  if (call.group_sizes) check_group_sizes({kOp, "group_sizes", *call.group_sizes}, call.argument());
  TP_CHECK_VALUE(input.sym_size(1) % (2 * kTile) == 0, kOp, "input",
                 "a last dimension that is a multiple of 256: two halves of whole tiles of 128",
                 describe(input), "Use activation_backward and quantize, which take any width");
  check_block_rows(call.argument(), format);
  check_tile_count(call.argument(), call.shape());
  check_quantize_params({call.argument(), call.shape(), kIntermediate}, format, call.key, kDirections,
                        call.params);
  return format;
}

struct ActivationBackwardResult {
  Outputs outputs;
  Tensor grad_probs;

  Tensors list() && {
    Tensors list = as_list(std::move(outputs));
    list.push_back(std::move(grad_probs));
    return list;
  }
};

ActivationBackwardResult make(const ActivationBackwardCall& call, const Format& format) {
  const c10::SymInt rows = call.probs ? call.input.sym_size(0) : c10::SymInt(0);
  return {make_outputs(call.input, call.shape(), format, kDirections), empty(call.input, {rows}, at::kFloat)};
}

void launch(const QuantizeArgs& args, const ActivationBackwardArgs& backward, void* stream) {
  const bool mx = args.layout.granularity == ScaleGranularity::k1x32;
  (mx ? launch_activation_backward_quantize_mx : launch_activation_backward_quantize)(args, backward, stream);
}
void launch(const NvArgs& args, const ActivationBackwardArgs& backward, void* stream) {
  launch_activation_backward_quantize_nv(args, backward, stream);
}

ActivationBackwardResult run(const ActivationBackwardCall& call) {
  const Format format = check_arguments(call);
  const GroupTables tables = group_tables(call.argument(), call.groups(), call.input.size(0),
                                          group_multiple(format, true), GroupUse::kEach, call.zero_tail);
  ActivationBackwardResult result = make(call, format);
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
  const ActivationBackwardArgs backward{g.const_data_ptr(),
                                        x.const_data_ptr(),
                                        has_probs ? p.const_data_ptr<float>() : nullptr,
                                        nullptr,
                                        has_probs ? result.grad_probs.mutable_data_ptr<float>() : nullptr,
                                        has_probs ? partial.mutable_data_ptr<float>() : nullptr,
                                        rows,
                                        features,
                                        to_dtype(x.scalar_type()),
                                        end,
                                        activation::parse_activation(kOp, call.activation_key)};
  visit_quantize_args(x, result.outputs, make_layout(call.shape(), format, tables), format, call.params,
                      [&](const auto& args) {
                        if (x.is_cpu()) return activation_backward_quantize_cpu(args, backward);
#ifdef TRANSFORMER_PLUGIN_CUDA
                        const CudaScope scope(x);
                        launch(args, backward, scope.stream());
#endif
                      });
  return result;
}

Tensors activation_backward_quantize(const Tensor& grad, const Tensor& input, std::string_view key,
                                     OptionalTensorArg probs, OptionalTensorArg group_sizes,
                                     OptionalTensorArg amax, OptionalTensorArg amax_t, OptionalTensorArg seed,
                                     bool zero_tail, std::string_view activation) {
  return run({grad, input, key, probs, group_sizes, {amax, amax_t, seed}, zero_tail, activation}).list();
}

Tensors activation_backward_quantize_meta(const Tensor& grad, const Tensor& input, std::string_view key,
                                          OptionalTensorArg probs, OptionalTensorArg group_sizes,
                                          OptionalTensorArg amax, OptionalTensorArg amax_t,
                                          OptionalTensorArg seed, bool zero_tail,
                                          std::string_view activation) {
  const ActivationBackwardCall call{grad,      input,     key, probs, group_sizes, {amax, amax_t, seed},
                                    zero_tail, activation};
  return make(call, check_arguments(call)).list();
}

}  // namespace

// Not differentiable: the results are themselves gradients.
TP_IMPL_NO_GRADIENT(activation_backward_quantize, activation_backward_quantize,
                    activation_backward_quantize_meta);

}  // namespace transformer_plugin::quantize
