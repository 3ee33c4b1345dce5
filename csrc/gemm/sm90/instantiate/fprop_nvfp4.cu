#include "gemm/sm90/microscaled/grouped_gemm_mx_nv.cuh"

namespace transformer_plugin::gemm {

void launch_hopper_nv(const GroupedKernelArgs& args, const HopperPlan& plan, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  if (widens_beside(args, plan)) {
    hopper::launch_clear_ready(args, on);
  } else {
    hopper::launch_widen_rows<hopper::NvCodes>(args, on);
  }
  hopper::launch_decoded_rows<hopper::NvCodes>(args, plan, on);
}

}  // namespace transformer_plugin::gemm
