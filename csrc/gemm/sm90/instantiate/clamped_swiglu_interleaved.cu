// Forward with clamped SwiGLU, gate and linear columns interleaved by 32.
#include "gemm/sm90/epilogue/activation.cuh"

namespace transformer_plugin::gemm {

ActivationLauncher clamped_swiglu_interleaved(DType dtype) {
  return dtype == DType::kBFloat16
             ? sm90::launch_grouped_gemm<
                   sm90::Mainloop16Bit<__nv_bfloat16, false>,
                   sm90::ActivationEpilogue<__nv_bfloat16, activation::ClampedSwiglu, true>>
             : sm90::launch_grouped_gemm<sm90::Mainloop16Bit<__half, false>,
                                         sm90::ActivationEpilogue<__half, activation::ClampedSwiglu, true>>;
}

}  // namespace transformer_plugin::gemm
