#include "gemm/sm90/grouped_gemm.cuh"

namespace transformer_plugin::gemm {

void launch_hopper_forward(const GroupedKernelArgs& args, const HopperPlan& plan, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  args.dtype == DType::kBFloat16
      ? hopper::launch_rows<hopper::Plain<__nv_bfloat16, false>>(args, plan, cuda_stream)
      : hopper::launch_rows<hopper::Plain<__half, false>>(args, plan, cuda_stream);
}

}  // namespace transformer_plugin::gemm
