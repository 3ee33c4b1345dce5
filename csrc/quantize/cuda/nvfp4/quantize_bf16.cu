// The NVFP4 kernels for one input dtype, in a separate file so that the three compile in parallel.
#include "quantize/cuda/nvfp4/kernels.cuh"

namespace transformer_plugin::quantize {

template void launch_quantize_nv<DType::kBFloat16>(const NvArgs& args, void* stream);

}  // namespace transformer_plugin::quantize
