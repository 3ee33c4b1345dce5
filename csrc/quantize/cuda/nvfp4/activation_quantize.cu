// Launches activations quantized to NVFP4: quantize_nv_source_kernel with the source of the activation.
#include "quantize/args/activation_quantize.h"
#include "quantize/cuda/fused/activation_source.cuh"
#include "quantize/cuda/nvfp4/runtime_options.cuh"

namespace transformer_plugin::quantize {

void launch_activation_quantize_nv(const NvArgs& args, const Activation& activation, const float* probs,
                                   void* stream) {
  activation::visit_quantized_function(activation, [&](auto function) {
    const auto source = [&](auto type) {
      return ActivationSource<decltype(type), decltype(function)>{probs, function};
    };
    launch_quantize_nv_source(args, source, stream);
  });
}

}  // namespace transformer_plugin::quantize
