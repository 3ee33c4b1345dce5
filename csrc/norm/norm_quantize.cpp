#include "norm/norm_quantize.h"

#include <torch/library.h>

#include "common/tensor.h"
#include "norm/norm_call.h"
#include "quantize/ops/fused.h"

namespace transformer_plugin::norm {
namespace {

using at::Tensor;
using quantize::Operand;
using quantize::Outputs;

constexpr quantize::Directions kRows{true, false};

struct QuantizeCall {
  Call norm;
  std::string_view key;
  quantize::GivenTensors given;

  Argument argument() const { return {norm.op, "input", norm.input}; }
  Operand operand() const {
    return quantize::matrix_operand(norm.input.sym_size(0), norm.input.sym_size(1), std::nullopt);
  }
};

struct Quantized {
  Outputs outputs;
  Stats stats;
};

// Blocks along a row: square ones of FP8 need 32 or 128 rows at once.
Format check_arguments(const QuantizeCall& call) {
  const Call& norm = call.norm;
  const Format format = quantize::quantized_format(norm.op, "format", call.key, true);
  TP_CHECK_VALUE(!format.square_blocks || format.is_nv(), norm.op, "format", "blocks along a row",
                 "'" << call.key << "'",
                 "Use " << (norm.centered ? "layer_norm" : "rms_norm") << ", and quantize its result");
  check_norm(norm);
  check_dim(call.argument(), 2);
  quantize::check_matrix(call.argument(), nullptr, format);
  const char* made = norm.centered
                         ? "what layer_norm gave in earlier steps, or use layer_norm, and quantize its result"
                         : "what rms_norm gave in earlier steps, or use rms_norm, and quantize its result";
  quantize::check_given({call.argument(), call.operand(), made}, format, call.key, kRows, call.given);
  return format;
}

Quantized make(const QuantizeCall& call, const Format& format) {
  return {quantize::make_outputs(call.norm.input, call.operand(), format, kRows), make_stats(call.norm)};
}

Quantized meta(const QuantizeCall& call) { return make(call, check_arguments(call)); }

void launch(const NormArgs& args, const QuantizeArgs& output, void* stream) {
  const bool mx = output.layout.mode == quantize::ScaleMode::kMx;
  (mx ? launch_norm_quantize_mx : launch_norm_quantize)(args, output, stream);
}
void launch(const NormArgs& args, const NvArgs& output, void* stream) {
  launch_norm_quantize_nv(args, output, stream);
}

Quantized run(const QuantizeCall& call) {
  const Format format = check_arguments(call);
  const Quantized result = make(call, format);
  const Tensor& input = call.norm.input;
  const Arguments arguments(call.norm, &result.stats);
  quantize::with_arguments(input, result.outputs, quantize::make_layout(call.operand(), format, {}), format,
                           call.given, [&](const auto& output) {
                             if (input.is_cpu()) return norm_quantize_cpu(arguments.get(), output);
#ifdef TRANSFORMER_PLUGIN_CUDA
                             const CudaScope scope(input);
                             launch(arguments.get(), output, scope.stream());
#endif
                           });
  return result;
}

using Maybe = const OptionalTensor&;
using Key = std::string_view;

template <auto run_op>
void register_ops(torch::Library& m) {
  m.impl("rms_norm_quantize",
         [](const Tensor& input, Maybe weight, double eps, Key key, bool zero_centered, Maybe amax,
            Maybe seed) -> std::tuple<Tensor, Tensor, Tensor> {
           const Quantized q =
               run_op({{"rms_norm_quantize", false, input, weight, kNoTensor, eps, zero_centered},
                       key,
                       {amax, kNoTensor, seed}});
           return {q.outputs.data, q.outputs.scale, q.stats.rstd};
         });
  m.impl("layer_norm_quantize",
         [](const Tensor& input, Maybe weight, Maybe bias, double eps, Key key, bool zero_centered,
            Maybe amax, Maybe seed) -> std::tuple<Tensor, Tensor, Tensor, Tensor> {
           const Quantized q = run_op({{"layer_norm_quantize", true, input, weight, bias, eps, zero_centered},
                                       key,
                                       {amax, kNoTensor, seed}});
           return {q.outputs.data, q.outputs.scale, q.stats.mean, q.stats.rstd};
         });
}

}  // namespace

TORCH_LIBRARY_IMPL(transformer_plugin, CPU, m) { register_ops<run>(m); }
TORCH_LIBRARY_IMPL(transformer_plugin, Meta, m) { register_ops<meta>(m); }

#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin, CUDA, m) { register_ops<run>(m); }
#endif

// Rounding has no gradient.
TORCH_LIBRARY_IMPL(transformer_plugin, Autograd, m) {
  for (const char* name : {"rms_norm_quantize", "layer_norm_quantize"}) {
    m.impl(name, torch::CppFunction::makeFallthrough());
  }
}

}  // namespace transformer_plugin::norm
