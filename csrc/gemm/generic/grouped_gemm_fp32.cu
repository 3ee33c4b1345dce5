#include "gemm/generic/mma_fma.cuh"

namespace transformer_plugin::gemm {

void launch_grouped_fp32(GroupedMode mode, const GroupedKernelArgs& args, void* stream) {
  launch_grouped<float, MultiplyFma>(mode, args, static_cast<cudaStream_t>(stream));
}

}  // namespace transformer_plugin::gemm
