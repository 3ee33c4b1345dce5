// Weight gradient with gathered rows of grad, BF16 or FP16, FP32 output.
#include "gemm/sm90/gather/grouped_wgrad_gather.cuh"

namespace transformer_plugin::gemm {

GatherLauncher wgrad_gather_fp32_out(DType dtype) {
  return dtype == DType::kBFloat16 ? sm90::launch_grouped_wgrad_gather<__nv_bfloat16, float>
                                   : sm90::launch_grouped_wgrad_gather<__half, float>;
}

}  // namespace transformer_plugin::gemm
