#include "gemm/sm90/epilogue/swiglu_quantize.cuh"

namespace transformer_plugin::gemm {

SwigluQuantizeLauncher swiglu_mxfp8(DType dtype) {
  return dtype == DType::kBFloat16
             ? sm90::launch_grouped_gemm<sm90::Plain<__nv_bfloat16, false>,
                                         sm90::SwigluQuantizeRows<__nv_bfloat16, false, sm90::MxScales>>
             : sm90::launch_grouped_gemm<sm90::Plain<__half, false>,
                                         sm90::SwigluQuantizeRows<__half, false, sm90::MxScales>>;
}

}  // namespace transformer_plugin::gemm
