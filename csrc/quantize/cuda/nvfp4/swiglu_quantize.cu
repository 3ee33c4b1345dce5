// Launches SwiGLU quantized to NVFP4: quantize_nv_source_kernel with the SwiGLU source.
#include "quantize/args/swiglu_quantize.h"
#include "quantize/cuda/fused/swiglu_source.cuh"
#include "quantize/cuda/nvfp4/runtime_options.cuh"

namespace transformer_plugin::quantize {

void launch_swiglu_quantize_nv(const NvArgs& args, const float* probs, void* stream) {
  launch_quantize_nv_source(args, [&](auto type) { return SwigluSource<decltype(type)>{probs}; }, stream);
}

}  // namespace transformer_plugin::quantize
