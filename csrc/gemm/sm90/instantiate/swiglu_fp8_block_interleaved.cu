#include "gemm/sm90/epilogue/swiglu_quantize.cuh"

namespace transformer_plugin::gemm {

SwigluQuantizeLauncher swiglu_fp8_block_interleaved(DType dtype) {
  return dtype == DType::kBFloat16
             ? sm90::launch_grouped_gemm<sm90::Plain<__nv_bfloat16, false>,
                                         sm90::SwigluQuantizeRows<__nv_bfloat16, true, sm90::BlockScales>>
             : sm90::launch_grouped_gemm<sm90::Plain<__half, false>,
                                         sm90::SwigluQuantizeRows<__half, true, sm90::BlockScales>>;
}

}  // namespace transformer_plugin::gemm
