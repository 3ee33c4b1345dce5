// Forward, MXFP8.
#include "gemm/sm90/microscaled/grouped_gemm_mx_nv.cuh"

namespace transformer_plugin::gemm {

// Each operand is E4M3 or E5M2.
Launcher fprop_mxfp8(DType a, DType b) {
  using E4M3 = sm90::MxFormat<DType::kFloat8E4M3>;
  using E5M2 = sm90::MxFormat<DType::kFloat8E5M2>;
  if (a == DType::kFloat8E5M2) {
    return b == DType::kFloat8E5M2 ? sm90::launch_grouped_gemm_mx_nv<E5M2, E5M2>
                                   : sm90::launch_grouped_gemm_mx_nv<E5M2, E4M3>;
  }
  return b == DType::kFloat8E5M2 ? sm90::launch_grouped_gemm_mx_nv<E4M3, E5M2>
                                 : sm90::launch_grouped_gemm_mx_nv<E4M3, E4M3>;
}

}  // namespace transformer_plugin::gemm
