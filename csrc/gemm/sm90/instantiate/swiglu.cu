// Forward with SwiGLU, gate columns first.
#include "gemm/sm90/epilogue/swiglu.cuh"

namespace transformer_plugin::gemm {

SwigluLauncher swiglu(DType dtype) {
  return dtype == DType::kBFloat16 ? sm90::launch_grouped_gemm<sm90::Mainloop16Bit<__nv_bfloat16, false>,
                                                               sm90::SwigluEpilogue<__nv_bfloat16, false>>
                                   : sm90::launch_grouped_gemm<sm90::Mainloop16Bit<__half, false>,
                                                               sm90::SwigluEpilogue<__half, false>>;
}

}  // namespace transformer_plugin::gemm
