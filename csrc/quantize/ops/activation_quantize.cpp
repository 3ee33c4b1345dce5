// activation_quantize: an activation with a gate whose result is quantized in the same pass.
#include "quantize/args/activation_quantize.h"

#include "activation/activation_checks.h"
#include "common/ops/quantize.h"
#include "common/register.h"
#include "common/tensor.h"
#include "quantize/ops/fused.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;

constexpr const char* kOp = "activation_quantize";

struct ActivationQuantizeCall {
  const Tensor& input;
  std::string_view key;
  const OptionalTensor& probs;
  const OptionalTensor& group_sizes;
  QuantizeParams params;
  Directions directions;
  bool zero_tail;
  std::string_view activation_key;

  Argument argument() const { return {kOp, "input", input}; }
  const Tensor* groups() const { return pointer_to(group_sizes); }
  // The shape of the activation's output, which is quantized.
  MatrixShape shape() const { return matrix_shape(input.sym_size(0), input.sym_size(1) / 2, group_sizes); }
};

constexpr const char* kIntermediate =
    "what activation gave in earlier steps, or use activation, and quantize its result";

Format check_arguments(const ActivationQuantizeCall& call) {
  const Tensor& input = call.input;
  const activation::NamedActivation activation = activation::parse_activation(kOp, call.activation_key);
  activation::check_fused_quantize(kOp, "activation", activation);
  check_directions(kOp, call.directions);
  const Format format = fused_format(kOp, "format", call.key, !call.group_sizes);
  activation::check_activation(kOp, input, call.probs, activation);
  if (call.group_sizes) check_group_sizes({kOp, "group_sizes", *call.group_sizes}, call.argument());
  const int64_t block = format.block_size();
  TP_CHECK_VALUE(input.sym_size(1) % (2 * block) == 0, kOp, "input",
                 "a last dimension that is a multiple of " << 2 * block << ": two halves in blocks of "
                                                           << (format.is_nv() ? "nvfp4" : "mxfp8") << ", "
                                                           << block,
                 describe(input), "Pad each half with zeros");
  if (call.directions.columnwise) check_block_rows(call.argument(), format);
  check_tile_count(call.argument(), call.shape());
  check_quantize_params({call.argument(), call.shape(), kIntermediate}, format, call.key, call.directions,
                        call.params);
  return format;
}

Outputs make(const ActivationQuantizeCall& call, const Format& format) {
  return make_outputs(call.input, call.shape(), format, call.directions);
}

void launch(const QuantizeArgs& args, const Activation& activation, const float* probs, void* stream) {
  const bool mx = args.layout.granularity == ScaleGranularity::k1x32;
  (mx ? launch_activation_quantize_mx : launch_activation_quantize)(args, activation, probs, stream);
}
void launch(const NvArgs& args, const Activation& activation, const float* probs, void* stream) {
  launch_activation_quantize_nv(args, activation, probs, stream);
}

Outputs run(const ActivationQuantizeCall& call) {
  const Format format = check_arguments(call);
  const bool columnwise = call.directions.columnwise;
  const GroupTables tables =
      group_tables(call.argument(), call.groups(), call.input.size(0), group_multiple(format, columnwise),
                   group_use(format, columnwise), call.zero_tail);
  Outputs outputs = make(call, format);
  const Tensor x = call.input.contiguous();
  const Tensor p = call.probs ? call.probs->contiguous() : Tensor();
  const float* prob = call.probs ? p.const_data_ptr<float>() : nullptr;
  const Activation activation = activation::parse_activation(kOp, call.activation_key);
  visit_quantize_args(x, outputs, make_layout(call.shape(), format, tables), format, call.params,
                      [&](const auto& args) {
                        if (x.is_cpu()) return activation_quantize_cpu(args, activation, prob);
#ifdef TRANSFORMER_PLUGIN_CUDA
                        const CudaScope scope(x);
                        launch(args, activation, prob, scope.stream());
#endif
                      });
  return outputs;
}

using Key = std::string_view;

Tensors activation_quantize(const Tensor& input, Key key, OptionalTensorArg probs,
                            OptionalTensorArg group_sizes, OptionalTensorArg amax, OptionalTensorArg amax_t,
                            OptionalTensorArg seed, bool rowwise, bool columnwise, bool zero_tail,
                            Key activation) {
  return as_list(run(
      {input, key, probs, group_sizes, {amax, amax_t, seed}, {rowwise, columnwise}, zero_tail, activation}));
}

Tensors activation_quantize_meta(const Tensor& input, Key key, OptionalTensorArg probs,
                                 OptionalTensorArg group_sizes, OptionalTensorArg amax,
                                 OptionalTensorArg amax_t, OptionalTensorArg seed, bool rowwise,
                                 bool columnwise, bool zero_tail, Key activation) {
  const ActivationQuantizeCall call{
      input, key, probs, group_sizes, {amax, amax_t, seed}, {rowwise, columnwise}, zero_tail, activation};
  return as_list(make(call, check_arguments(call)));
}

}  // namespace

// Rounding has no gradient.
TP_IMPL_NO_GRADIENT(activation_quantize, activation_quantize, activation_quantize_meta);

}  // namespace transformer_plugin::quantize
