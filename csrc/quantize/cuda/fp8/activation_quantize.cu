// Launches activations quantized to FP8: the row-streaming kernels (fused/activation_stream.cuh), or else the tile
// kernel.
#include "quantize/args/activation_quantize.h"
#include "quantize/cuda/fp8/streaming.cuh"
#include "quantize/cuda/fused/activation_source.cuh"
#include "quantize/cuda/fused/activation_stream.cuh"

namespace transformer_plugin::quantize {

void launch_activation_quantize(const QuantizeArgs& args, const Activation& activation, const float* probs,
                                void* stream) {
  const unsigned grid = block_grid(args.layout);
  if (grid == 0) return launch_tensor_scales(args, stream);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  activation::visit_quantized_function(activation, [&](auto function) {
    if (can_stream(args, args.input)) {
      return launch_activation_stream<Fp8Stream>(args, function, probs, cuda_stream);
    }
    visit_float_fp8(args.dtype, args.element, [&](auto type, auto element) {
      using Source = ActivationSource<decltype(type), decltype(function)>;
      quantize_kernel<Source, decltype(element)::value>
          <<<grid, kThreads, 0, cuda_stream>>>(args, Source{probs, function});
    });
    check_launch("quantize_kernel");
  });
}

}  // namespace transformer_plugin::quantize
