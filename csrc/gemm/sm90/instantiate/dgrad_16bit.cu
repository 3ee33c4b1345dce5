#include "gemm/sm90/grouped_gemm.cuh"

namespace transformer_plugin::gemm {

void launch_hopper_data_grad(const GroupedKernelArgs& args, const HopperPlan& plan, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  args.dtype == DType::kBFloat16
      ? hopper::launch_rows<hopper::Plain<__nv_bfloat16, true>>(args, plan, cuda_stream)
      : hopper::launch_rows<hopper::Plain<__half, true>>(args, plan, cuda_stream);
}

}  // namespace transformer_plugin::gemm
