// Forward, BF16 or FP16: b is [G, n, k].
#include "gemm/sm90/grouped_gemm.cuh"

namespace transformer_plugin::gemm {

Launcher fprop_16bit(DType dtype) {
  return dtype == DType::kBFloat16 ? sm90::launch_grouped_gemm<sm90::Mainloop16Bit<__nv_bfloat16, false>>
                                   : sm90::launch_grouped_gemm<sm90::Mainloop16Bit<__half, false>>;
}

}  // namespace transformer_plugin::gemm
