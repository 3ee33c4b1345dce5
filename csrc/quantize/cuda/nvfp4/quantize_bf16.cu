#include "quantize/cuda/nvfp4/kernels.cuh"

namespace transformer_plugin::quantize {

void launch_quantize_nv_bf16(const NvArgs& args, void* stream) {
  launch_quantize_nv_of<__nv_bfloat16>(args, stream);
}

}  // namespace transformer_plugin::quantize
