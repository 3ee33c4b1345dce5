// Launches the backward of activations, quantized to MXFP8 (fused/).
#include "quantize/cuda/fused/activation_backward_quantize.cuh"
#include "quantize/cuda/mxfp8/streaming.cuh"

namespace transformer_plugin::quantize {

void launch_activation_backward_quantize_mx(const QuantizeArgs& args, const ActivationBackwardArgs& backward,
                                            void* stream) {
  launch_activation_backward_fp8<MxTileOps, MxStream>(args, backward, stream);
}

}  // namespace transformer_plugin::quantize
