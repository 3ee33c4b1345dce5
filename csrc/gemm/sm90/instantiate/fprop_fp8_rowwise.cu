#include "gemm/sm90/grouped_gemm.cuh"

namespace transformer_plugin::gemm {

void launch_hopper_rowwise(const GroupedKernelArgs& args, const HopperPlan& plan, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  args.dtype == DType::kFloat8E4M3
      ? hopper::launch_rows<hopper::RowScaledCodes<DType::kFloat8E4M3>>(args, plan, cuda_stream)
      : hopper::launch_rows<hopper::RowScaledCodes<DType::kFloat8E5M2>>(args, plan, cuda_stream);
}

}  // namespace transformer_plugin::gemm
