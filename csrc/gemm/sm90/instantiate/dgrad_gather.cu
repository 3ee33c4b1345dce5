// Data gradient with gathered rows, BF16 or FP16.
#include "gemm/sm90/gather/grouped_gemm_gather.cuh"

namespace transformer_plugin::gemm {

GatherLauncher dgrad_gather(DType dtype) {
  return dtype == DType::kBFloat16
             ? sm90::launch_grouped_gemm_gather<sm90::GatherMainloop16Bit<__nv_bfloat16, true>>
             : sm90::launch_grouped_gemm_gather<sm90::GatherMainloop16Bit<__half, true>>;
}

}  // namespace transformer_plugin::gemm
