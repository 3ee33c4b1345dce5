// Launches the backward of activations, quantized to NVFP4 (fused/activation_backward_quantize.cuh).
#include "quantize/cuda/fused/activation_backward_quantize.cuh"
#include "quantize/cuda/nvfp4/runtime_options.cuh"

namespace transformer_plugin::quantize {

void launch_activation_backward_quantize_nv(const NvArgs& args, const ActivationBackwardArgs& backward,
                                            void* stream) {
  const unsigned grid = block_grid(half_of(args.layout));
  if (grid > 0) {
    activation::visit_quantized_function(backward.activation, [&](auto function) {
      visit_device_float(args.dtype, [&](auto type) {
        using T = decltype(type);
        launch_activation_backward_tiles<T, NvTileOps<T>>(args, backward, function, grid,
                                                          static_cast<cudaStream_t>(stream));
      });
    });
  }
  if (backward.grad_probs) activation::launch_add_row_sums(backward, stream);
}

}  // namespace transformer_plugin::quantize
