#include "gemm/sm90/wgrad/grouped_wgrad.cuh"

namespace transformer_plugin::gemm {
namespace {

template <DType grad_type>
void launch(const GroupedKernelArgs& args, const HopperPlan& plan, cudaStream_t stream) {
  using Kind = hopper::CodeColumns<grad_type>;
  args.out_dtype == DType::kFloat32 ? hopper::launch_weight_grad<Kind, float>(args, plan, stream)
                                    : hopper::launch_weight_grad<Kind, __nv_bfloat16>(args, plan, stream);
}

}  // namespace

void launch_hopper_weight_grad_codes(const GroupedKernelArgs& args, const HopperPlan& plan, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  args.dtype == DType::kFloat8E4M3 ? launch<DType::kFloat8E4M3>(args, plan, cuda_stream)
                                   : launch<DType::kFloat8E5M2>(args, plan, cuda_stream);
}

}  // namespace transformer_plugin::gemm
