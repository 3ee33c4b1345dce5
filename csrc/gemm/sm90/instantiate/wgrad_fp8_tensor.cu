// Weight gradient, FP8 with one scale for each group.
#include "gemm/sm90/wgrad/grouped_wgrad.cuh"

namespace transformer_plugin::gemm {

Launcher wgrad_fp8_tensor(DType grad, DType out) {
  using E4M3 = sm90::WgradMainloopFp8Tensor<DType::kFloat8E4M3>;
  using E5M2 = sm90::WgradMainloopFp8Tensor<DType::kFloat8E5M2>;
  if (grad == DType::kFloat8E4M3) {
    return out == DType::kFloat32 ? sm90::launch_grouped_wgrad<E4M3, float>
                                  : sm90::launch_grouped_wgrad<E4M3, __nv_bfloat16>;
  }
  return out == DType::kFloat32 ? sm90::launch_grouped_wgrad<E5M2, float>
                                : sm90::launch_grouped_wgrad<E5M2, __nv_bfloat16>;
}

}  // namespace transformer_plugin::gemm
