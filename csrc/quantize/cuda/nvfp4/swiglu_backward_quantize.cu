// Launches the backward of SwiGLU, quantized to NVFP4 (fused/swiglu_backward_quantize.cuh).
#include "quantize/cuda/fused/swiglu_backward_quantize.cuh"
#include "quantize/cuda/nvfp4/runtime_options.cuh"

namespace transformer_plugin::quantize {

void launch_swiglu_backward_quantize_nv(const NvArgs& args, const SwigluBackwardArgs& swiglu, void* stream) {
  const unsigned grid = block_grid(half_of(args.layout));
  if (grid > 0) {
    visit_device_float(args.dtype, [&](auto type) {
      using T = decltype(type);
      launch_swiglu_backward_tiles<T, NvTileOps<T>>(args, swiglu, grid, static_cast<cudaStream_t>(stream));
    });
  }
  if (swiglu.grad_probs) activation::launch_add_row_sums(swiglu, stream);
}

}  // namespace transformer_plugin::quantize
