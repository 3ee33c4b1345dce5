// Forward with SwiGLU and gathered rows, gate columns first.
#include "gemm/sm90/epilogue/swiglu.cuh"
#include "gemm/sm90/gather/grouped_gemm_gather.cuh"

namespace transformer_plugin::gemm {

SwigluGatherLauncher swiglu_gather(DType dtype) {
  return dtype == DType::kBFloat16
             ? sm90::launch_grouped_gemm_gather<sm90::GatherMainloop16Bit<__nv_bfloat16, false>,
                                                sm90::SwigluEpilogue<__nv_bfloat16, false>>
             : sm90::launch_grouped_gemm_gather<sm90::GatherMainloop16Bit<__half, false>,
                                                sm90::SwigluEpilogue<__half, false>>;
}

}  // namespace transformer_plugin::gemm
