// Launches the backward of activations, quantized to FP8 (fused/).
#include "quantize/cuda/fp8/streaming.cuh"
#include "quantize/cuda/fused/activation_backward_quantize.cuh"

namespace transformer_plugin::quantize {

void launch_activation_backward_quantize(const QuantizeArgs& args, const ActivationBackwardArgs& backward,
                                         void* stream) {
  if (block_grid(args.layout) == 0) launch_tensor_scales(args, stream);
  launch_activation_backward_fp8<Fp8TileOps, Fp8Stream>(args, backward, stream);
}

}  // namespace transformer_plugin::quantize
