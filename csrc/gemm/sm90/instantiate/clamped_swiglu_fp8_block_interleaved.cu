// Forward with clamped SwiGLU quantized to FP8, 1x128 blocks, columns interleaved by 32.
#include "gemm/sm90/epilogue/activation_quantize.cuh"

namespace transformer_plugin::gemm {

ActivationQuantizeLauncher clamped_swiglu_fp8_block_interleaved(DType dtype) {
  return dtype == DType::kBFloat16
             ? sm90::launch_grouped_gemm<
                   sm90::Mainloop16Bit<__nv_bfloat16, false>,
                   sm90::ActivationQuantizeEpilogue<__nv_bfloat16, activation::ClampedSwiglu, true,
                                                    sm90::Fp8BlockRowScales>>
             : sm90::launch_grouped_gemm<sm90::Mainloop16Bit<__half, false>,
                                         sm90::ActivationQuantizeEpilogue<__half, activation::ClampedSwiglu,
                                                                          true, sm90::Fp8BlockRowScales>>;
}

}  // namespace transformer_plugin::gemm
