#include "gemm/sm90/epilogue/swiglu.cuh"

namespace transformer_plugin::gemm {

SwigluLauncher swiglu(DType dtype) {
  return dtype == DType::kBFloat16
             ? sm90::launch_grouped_gemm<sm90::Plain<__nv_bfloat16, false>,
                                         sm90::SwigluRows<__nv_bfloat16, false>>
             : sm90::launch_grouped_gemm<sm90::Plain<__half, false>, sm90::SwigluRows<__half, false>>;
}

}  // namespace transformer_plugin::gemm
