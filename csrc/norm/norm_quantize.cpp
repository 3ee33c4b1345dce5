// rms_norm_quantize and layer_norm_quantize: a norm whose result is quantized along rows in the same pass.
#include "norm/norm_quantize.h"

#include "common/ops/norm.h"
#include "common/register.h"
#include "common/tensor.h"
#include "norm/norm_call.h"
#include "quantize/ops/fused.h"

namespace transformer_plugin::norm {
namespace {

using at::Tensor;
using quantize::MatrixShape;
using quantize::Outputs;

constexpr quantize::Directions kRows{true, false};

struct QuantizeCall {
  NormCall norm;
  std::string_view key;
  quantize::QuantizeParams params;

  Argument argument() const { return {norm.op, "input", norm.input}; }
  MatrixShape shape() const {
    return quantize::matrix_shape(norm.input.sym_size(0), norm.input.sym_size(1), std::nullopt);
  }
};

struct Quantized {
  Outputs outputs;
  Stats stats;
};

// Blocks along a row only: square FP8 blocks would need 32 or 128 rows at once.
Format check_arguments(const QuantizeCall& call) {
  const NormCall& norm = call.norm;
  const Format format = quantize::fused_format(norm.op, "format", call.key, true);
  TP_CHECK_VALUE(!format.square_blocks || format.is_nv(), norm.op, "format", "blocks along a row",
                 "'" << call.key << "'",
                 "Use " << (norm.centered ? "layer_norm" : "rms_norm") << ", and quantize its result");
  check_norm(norm);
  check_dim(call.argument(), 2);
  quantize::check_matrix(call.argument(), nullptr, format);
  const char* intermediate =
      norm.centered ? "what layer_norm gave in earlier steps, or use layer_norm, and quantize its result"
                    : "what rms_norm gave in earlier steps, or use rms_norm, and quantize its result";
  quantize::check_quantize_params({call.argument(), call.shape(), intermediate}, format, call.key, kRows,
                                  call.params);
  return format;
}

Quantized make(const QuantizeCall& call, const Format& format) {
  return {quantize::make_outputs(call.norm.input, call.shape(), format, kRows), make_stats(call.norm)};
}

Quantized meta(const QuantizeCall& call) { return make(call, check_arguments(call)); }

void launch(const NormArgs& args, const QuantizeArgs& output, void* stream) {
  const bool mx = output.layout.granularity == quantize::ScaleGranularity::k1x32;
  (mx ? launch_norm_quantize_mx : launch_norm_quantize)(args, output, stream);
}
void launch(const NormArgs& args, const NvArgs& output, void* stream) {
  launch_norm_quantize_nv(args, output, stream);
}

Quantized run(const QuantizeCall& call) {
  const Format format = check_arguments(call);
  const Quantized result = make(call, format);
  const Tensor& input = call.norm.input;
  const NormArgsOwner arguments(call.norm, &result.stats);
  quantize::visit_quantize_args(input, result.outputs, quantize::make_layout(call.shape(), format, {}),
                                format, call.params, [&](const auto& output) {
                                  if (input.is_cpu()) return norm_quantize_cpu(arguments.get(), output);
#ifdef TRANSFORMER_PLUGIN_CUDA
                                  const CudaScope scope(input);
                                  launch(arguments.get(), output, scope.stream());
#endif
                                });
  return result;
}

using Key = std::string_view;

template <Quantized (*run_op)(const QuantizeCall&)>
std::tuple<Tensor, Tensor, Tensor> rms_norm_quantize(const Tensor& input, OptionalTensorArg weight,
                                                     double eps, Key key, bool zero_centered,
                                                     OptionalTensorArg amax, OptionalTensorArg seed) {
  const Quantized q = run_op({{"rms_norm_quantize", false, input, weight, kNoTensor, eps, zero_centered},
                              key,
                              {amax, kNoTensor, seed}});
  return {q.outputs.data, q.outputs.scale, q.stats.rstd};
}

template <Quantized (*run_op)(const QuantizeCall&)>
std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_quantize(const Tensor& input, OptionalTensorArg weight,
                                                               OptionalTensorArg bias, double eps, Key key,
                                                               bool zero_centered, OptionalTensorArg amax,
                                                               OptionalTensorArg seed) {
  const Quantized q = run_op(
      {{"layer_norm_quantize", true, input, weight, bias, eps, zero_centered}, key, {amax, kNoTensor, seed}});
  return {q.outputs.data, q.outputs.scale, q.stats.mean, q.stats.rstd};
}

}  // namespace

// Rounding has no gradient.
TP_IMPL_NO_GRADIENT(rms_norm_quantize, rms_norm_quantize<run>, rms_norm_quantize<meta>);
TP_IMPL_NO_GRADIENT(layer_norm_quantize, layer_norm_quantize<run>, layer_norm_quantize<meta>);

}  // namespace transformer_plugin::norm
