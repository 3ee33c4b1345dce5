#include "gemm/sm90/gather/grouped_gemm_gather.cuh"

namespace transformer_plugin::gemm {

void launch_hopper_gather_data_grad(const GroupedKernelArgs& args, const TakenRows& rows,
                                    const HopperPlan& plan, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  args.dtype == DType::kBFloat16
      ? hopper::launch_gather<hopper::Plain<__nv_bfloat16, true>>(args, rows, plan, cuda_stream)
      : hopper::launch_gather<hopper::Plain<__half, true>>(args, rows, plan, cuda_stream);
}

}  // namespace transformer_plugin::gemm
