#include "quantize/cuda/nvfp4/kernels.cuh"

namespace transformer_plugin::quantize {

void launch_quantize_nv_fp32(const NvArgs& args, void* stream) { launch_quantize_nv_of<float>(args, stream); }

}  // namespace transformer_plugin::quantize
