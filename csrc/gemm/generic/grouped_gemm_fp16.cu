#include "gemm/generic/mma_tensor_core.cuh"

namespace transformer_plugin::gemm {

void launch_grouped_fp16(GroupedMode mode, const GroupedKernelArgs& args, void* stream) {
  launch_grouped<__half, MultiplyTensorCore>(mode, args, static_cast<cudaStream_t>(stream));
}

}  // namespace transformer_plugin::gemm
