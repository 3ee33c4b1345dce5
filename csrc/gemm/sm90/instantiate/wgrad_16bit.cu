#include "gemm/sm90/wgrad/grouped_wgrad.cuh"

namespace transformer_plugin::gemm {

void launch_hopper_weight_grad(const GroupedKernelArgs& args, const HopperPlan& plan, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  args.dtype == DType::kBFloat16
      ? hopper::launch_weight_grad<hopper::PlainColumns<__nv_bfloat16>, __nv_bfloat16>(args, plan,
                                                                                       cuda_stream)
      : hopper::launch_weight_grad<hopper::PlainColumns<__half>, __half>(args, plan, cuda_stream);
}

}  // namespace transformer_plugin::gemm
