// Forward with clamped SwiGLU and gathered rows, gate columns first.
#include "gemm/sm90/epilogue/activation.cuh"
#include "gemm/sm90/gather/grouped_gemm_gather.cuh"

namespace transformer_plugin::gemm {

ActivationGatherLauncher clamped_swiglu_gather(DType dtype) {
  return dtype == DType::kBFloat16
             ? sm90::launch_grouped_gemm_gather<
                   sm90::GatherMainloop16Bit<__nv_bfloat16, false>,
                   sm90::ActivationEpilogue<__nv_bfloat16, activation::ClampedSwiglu, false>>
             : sm90::launch_grouped_gemm_gather<
                   sm90::GatherMainloop16Bit<__half, false>,
                   sm90::ActivationEpilogue<__half, activation::ClampedSwiglu, false>>;
}

}  // namespace transformer_plugin::gemm
