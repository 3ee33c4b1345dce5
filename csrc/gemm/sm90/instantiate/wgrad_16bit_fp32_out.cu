// Weight gradient, BF16 or FP16 operands, FP32 output.
#include "gemm/sm90/wgrad/grouped_wgrad.cuh"

namespace transformer_plugin::gemm {

Launcher wgrad_16bit_fp32_out(DType dtype) {
  return dtype == DType::kBFloat16
             ? sm90::launch_grouped_wgrad<sm90::WgradMainloop16Bit<__nv_bfloat16>, float>
             : sm90::launch_grouped_wgrad<sm90::WgradMainloop16Bit<__half>, float>;
}

}  // namespace transformer_plugin::gemm
