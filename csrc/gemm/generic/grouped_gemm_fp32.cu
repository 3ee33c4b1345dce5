// The grouped GEMM for any GPU, FP32 operands.
#include "gemm/generic/mma_fma.cuh"

namespace transformer_plugin::gemm {

void launch_generic_fp32(GemmDirection direction, const GroupedGemmArgs& args, void* stream) {
  launch_grouped<float, FmaMma>(direction, args, static_cast<cudaStream_t>(stream));
}

}  // namespace transformer_plugin::gemm
