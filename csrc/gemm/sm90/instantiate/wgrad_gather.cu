// Weight gradient with gathered rows of grad, BF16 or FP16, in the dtype of the operands.
#include "gemm/sm90/gather/grouped_wgrad_gather.cuh"

namespace transformer_plugin::gemm {

GatherLauncher wgrad_gather(DType dtype) {
  return dtype == DType::kBFloat16 ? sm90::launch_grouped_wgrad_gather<__nv_bfloat16, __nv_bfloat16>
                                   : sm90::launch_grouped_wgrad_gather<__half, __half>;
}

}  // namespace transformer_plugin::gemm
