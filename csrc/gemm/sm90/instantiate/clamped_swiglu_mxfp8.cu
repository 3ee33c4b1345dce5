// Forward with clamped SwiGLU quantized to MXFP8, gate columns first.
#include "gemm/sm90/epilogue/activation_quantize.cuh"

namespace transformer_plugin::gemm {

ActivationQuantizeLauncher clamped_swiglu_mxfp8(DType dtype) {
  return dtype == DType::kBFloat16
             ? sm90::launch_grouped_gemm<
                   sm90::Mainloop16Bit<__nv_bfloat16, false>,
                   sm90::ActivationQuantizeEpilogue<__nv_bfloat16, activation::ClampedSwiglu, false,
                                                    sm90::Mxfp8RowScales>>
             : sm90::launch_grouped_gemm<sm90::Mainloop16Bit<__half, false>,
                                         sm90::ActivationQuantizeEpilogue<__half, activation::ClampedSwiglu,
                                                                          false, sm90::Mxfp8RowScales>>;
}

}  // namespace transformer_plugin::gemm
