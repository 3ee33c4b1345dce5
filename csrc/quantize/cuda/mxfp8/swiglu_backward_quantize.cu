// Launches the backward of SwiGLU, quantized to MXFP8 (fused/).
#include "quantize/cuda/fused/swiglu_backward_quantize.cuh"
#include "quantize/cuda/mxfp8/streaming.cuh"

namespace transformer_plugin::quantize {

void launch_swiglu_backward_quantize_mx(const QuantizeArgs& args, const SwigluBackwardArgs& swiglu,
                                        void* stream) {
  launch_swiglu_backward_fp8<MxTileOps, MxStream>(args, swiglu, stream);
}

}  // namespace transformer_plugin::quantize
