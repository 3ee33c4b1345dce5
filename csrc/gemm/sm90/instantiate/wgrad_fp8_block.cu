#include "gemm/sm90/wgrad/grouped_wgrad.cuh"

namespace transformer_plugin::gemm {

void launch_hopper_weight_grad_blocks(const GroupedKernelArgs& args, const HopperPlan& plan, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  args.out_dtype == DType::kFloat32
      ? hopper::launch_weight_grad<hopper::BlockColumns<float>, float>(args, plan, cuda_stream)
      : hopper::launch_weight_grad<hopper::BlockColumns<__nv_bfloat16>, __nv_bfloat16>(args, plan,
                                                                                       cuda_stream);
}

}  // namespace transformer_plugin::gemm
