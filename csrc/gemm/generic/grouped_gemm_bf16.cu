// The grouped GEMM for any GPU, BF16 operands.
#include "gemm/generic/mma_tensor_core.cuh"

namespace transformer_plugin::gemm {

void launch_generic_bf16(GemmDirection direction, const GroupedGemmArgs& args, void* stream) {
  launch_grouped<__nv_bfloat16, TensorCoreMma>(direction, args, static_cast<cudaStream_t>(stream));
}

}  // namespace transformer_plugin::gemm
