#include "norm/norm_quantize.h"

#include <torch/library.h>

#include "common/tensor.h"
#include "norm/norm_call.h"
#include "quantize/fused.h"

namespace transformer_plugin::norm {
namespace {

using at::Tensor;
using quantize::Operand;
using quantize::Outputs;

struct Quantized {
  Outputs outputs;
  Stats stats;
};

Operand operand_of(const Call& call) {
  return quantize::matrix_operand(call.input.sym_size(0), call.input.sym_size(1), std::nullopt);
}

// Blocks along a row: square ones need 128 rows at once.
Format check_arguments(const Call& call, std::string_view key) {
  const char* advice =
      call.centered ? "Use layer_norm, and quantize its result" : "Use rms_norm, and quantize its result";
  const Format format = quantize::block_format(call.op, key, std::nullopt, advice);
  TP_CHECK_VALUE(!format.square_blocks, call.op, "format", "blocks along a row", "'" << key << "'", advice);
  check_norm(call);
  check_dim({call.op, "input", call.input}, 2);
  quantize::check_matrix({call.op, "input", call.input}, nullptr, format);
  return format;
}

Quantized make_outputs(const Call& call, const Format& format) {
  return {quantize::make_outputs(call.input, operand_of(call), format, {true, false}), make_stats(call)};
}

Quantized meta(const Call& call, std::string_view key) {
  return make_outputs(call, check_arguments(call, key));
}

Quantized run(const Call& call, std::string_view key) {
  const Format format = check_arguments(call, key);
  const Quantized result = make_outputs(call, format);
  const Arguments arguments(call, &result.stats);
  const QuantizeArgs output = quantize::quantize_args(
      call.input, result.outputs, quantize::make_layout(operand_of(call), format, {}), format, Tensor());
  if (call.input.is_cpu()) {
    norm_quantize_cpu(arguments.get(), output);
    return result;
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(call.input);
  const bool mx = format.family == FormatFamily::kMxFp8;
  (mx ? launch_norm_quantize_mx : launch_norm_quantize)(arguments.get(), output, scope.stream());
#endif
  return result;
}

template <auto run_op>
void register_ops(torch::Library& m) {
  m.impl("rms_norm_quantize",
         [](const Tensor& input, const OptionalTensor& weight, double eps, std::string_view key,
            bool zero_centered) -> std::tuple<Tensor, Tensor, Tensor> {
           const Quantized q =
               run_op({"rms_norm_quantize", false, input, weight, kNoTensor, eps, zero_centered}, key);
           return {q.outputs.data, q.outputs.scale, q.stats.rstd};
         });
  m.impl("layer_norm_quantize",
         [](const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
            std::string_view key, bool zero_centered) -> std::tuple<Tensor, Tensor, Tensor, Tensor> {
           const Quantized q =
               run_op({"layer_norm_quantize", true, input, weight, bias, eps, zero_centered}, key);
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
