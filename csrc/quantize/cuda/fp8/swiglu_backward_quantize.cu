// Launches the backward of SwiGLU, quantized to FP8 (fused/).
#include "quantize/cuda/fp8/streaming.cuh"
#include "quantize/cuda/fused/swiglu_backward_quantize.cuh"

namespace transformer_plugin::quantize {

void launch_swiglu_backward_quantize(const QuantizeArgs& args, const SwigluBackwardArgs& swiglu,
                                     void* stream) {
  if (block_grid(args.layout) == 0) launch_tensor_scales(args, stream);
  launch_swiglu_backward_fp8<Fp8TileOps, Fp8Stream>(args, swiglu, stream);
}

}  // namespace transformer_plugin::quantize
