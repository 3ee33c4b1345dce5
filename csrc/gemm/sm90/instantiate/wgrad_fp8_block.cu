// Weight gradient, FP8 with scales of 1x128 blocks.
#include "gemm/sm90/wgrad/grouped_wgrad.cuh"

namespace transformer_plugin::gemm {

Launcher wgrad_fp8_block(DType out) {
  return out == DType::kFloat32
             ? sm90::launch_grouped_wgrad<sm90::WgradMainloopFp8Block<float>, float>
             : sm90::launch_grouped_wgrad<sm90::WgradMainloopFp8Block<__nv_bfloat16>, __nv_bfloat16>;
}

}  // namespace transformer_plugin::gemm
