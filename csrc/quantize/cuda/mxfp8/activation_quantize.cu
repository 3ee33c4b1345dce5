// Launches activations quantized to MXFP8: the row-streaming kernels (fused/activation_stream.cuh), or else the tile
// kernel.
#include "quantize/args/activation_quantize.h"
#include "quantize/cuda/fused/activation_source.cuh"
#include "quantize/cuda/fused/activation_stream.cuh"
#include "quantize/cuda/mxfp8/streaming.cuh"

namespace transformer_plugin::quantize {

void launch_activation_quantize_mx(const QuantizeArgs& args, const Activation& activation, const float* probs,
                                   void* stream) {
  const unsigned grid = block_grid(args.layout);
  if (grid == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  activation::visit_quantized_function(activation, [&](auto function) {
    if (can_stream(args, args.input)) {
      return launch_activation_stream<MxStream>(args, function, probs, cuda_stream);
    }
    visit_float_fp8(args.dtype, args.element, [&](auto type, auto element) {
      using Source = ActivationSource<decltype(type), decltype(function)>;
      quantize_mx_kernel<Source, decltype(element)::value>
          <<<grid, kThreads, 0, cuda_stream>>>(args, Source{probs, function});
    });
    check_launch("quantize_mx_kernel");
  });
}

}  // namespace transformer_plugin::quantize
