#include "gemm/sm90/grouped_gemm.cuh"

namespace transformer_plugin::gemm {

void launch_hopper_blocks(const GroupedKernelArgs& args, const HopperPlan& plan, void* stream) {
  hopper::launch_rows<hopper::Blocks>(args, plan, static_cast<cudaStream_t>(stream));
}

}  // namespace transformer_plugin::gemm
