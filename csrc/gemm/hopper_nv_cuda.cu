#include "gemm/hopper_decoded.cuh"

namespace transformer_plugin::gemm {

void launch_hopper_nv(const GroupedKernelArgs& args, const HopperPlan& plan, void* stream) {
  hopper::launch_decoded_rows<hopper::NvCodes>(args, plan, static_cast<cudaStream_t>(stream));
}

}  // namespace transformer_plugin::gemm
