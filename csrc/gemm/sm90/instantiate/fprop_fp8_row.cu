// Forward, FP8 with one scale for each row. The dtype is that of a.
#include "gemm/sm90/grouped_gemm.cuh"

namespace transformer_plugin::gemm {

Launcher fprop_fp8_row(DType dtype) {
  return dtype == DType::kFloat8E4M3 ? sm90::launch_grouped_gemm<sm90::MainloopFp8Row<DType::kFloat8E4M3>>
                                     : sm90::launch_grouped_gemm<sm90::MainloopFp8Row<DType::kFloat8E5M2>>;
}

}  // namespace transformer_plugin::gemm
