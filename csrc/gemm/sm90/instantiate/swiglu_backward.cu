// Data gradient through SwiGLU.
#include "gemm/sm90/epilogue/swiglu_backward.cuh"

namespace transformer_plugin::gemm {

SwigluBackwardLauncher swiglu_backward(DType dtype) {
  return dtype == DType::kBFloat16
             ? sm90::launch_grouped_gemm<
                   sm90::Mainloop16Bit<__nv_bfloat16, true, sm90::SwigluBackwardSharedStorage>,
                   sm90::SwigluBackwardEpilogue<__nv_bfloat16>>
             : sm90::launch_grouped_gemm<sm90::Mainloop16Bit<__half, true, sm90::SwigluBackwardSharedStorage>,
                                         sm90::SwigluBackwardEpilogue<__half>>;
}

}  // namespace transformer_plugin::gemm
