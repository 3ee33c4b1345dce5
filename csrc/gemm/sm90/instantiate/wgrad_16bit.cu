// Weight gradient, BF16 or FP16, in the dtype of the operands.
#include "gemm/sm90/wgrad/grouped_wgrad.cuh"

namespace transformer_plugin::gemm {

Launcher wgrad_16bit(DType dtype) {
  return dtype == DType::kBFloat16
             ? sm90::launch_grouped_wgrad<sm90::WgradMainloop16Bit<__nv_bfloat16>, __nv_bfloat16>
             : sm90::launch_grouped_wgrad<sm90::WgradMainloop16Bit<__half>, __half>;
}

}  // namespace transformer_plugin::gemm
