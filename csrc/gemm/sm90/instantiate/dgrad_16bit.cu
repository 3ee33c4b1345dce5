// Data gradient, BF16 or FP16: b is [G, k, n].
#include "gemm/sm90/grouped_gemm.cuh"

namespace transformer_plugin::gemm {

Launcher dgrad_16bit(DType dtype) {
  return dtype == DType::kBFloat16 ? sm90::launch_grouped_gemm<sm90::Mainloop16Bit<__nv_bfloat16, true>>
                                   : sm90::launch_grouped_gemm<sm90::Mainloop16Bit<__half, true>>;
}

}  // namespace transformer_plugin::gemm
