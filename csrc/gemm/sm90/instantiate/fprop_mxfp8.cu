#include "gemm/sm90/microscaled/grouped_gemm_mx_nv.cuh"

namespace transformer_plugin::gemm {

// Either operand may be E4M3 or E5M2.
void launch_hopper_mx(const GroupedKernelArgs& args, const HopperPlan& plan, void* stream) {
  using E4M3 = hopper::MxCodes<DType::kFloat8E4M3>;
  using E5M2 = hopper::MxCodes<DType::kFloat8E5M2>;
  const auto on = static_cast<cudaStream_t>(stream);
  if (widens_beside(args, plan)) {
    hopper::launch_clear_ready(args, on);
  } else {
    args.dtype == DType::kFloat8E5M2 ? hopper::launch_widen_rows<E5M2>(args, on)
                                     : hopper::launch_widen_rows<E4M3>(args, on);
  }
  args.b_dtype == DType::kFloat8E5M2 ? hopper::launch_decoded_rows<E5M2>(args, plan, on)
                                     : hopper::launch_decoded_rows<E4M3>(args, plan, on);
}

}  // namespace transformer_plugin::gemm
