// Forward, NVFP4.
#include "gemm/sm90/microscaled/grouped_gemm_mx_nv.cuh"

namespace transformer_plugin::gemm {

Launcher fprop_nvfp4() { return sm90::launch_grouped_gemm_mx_nv<sm90::NvFormat, sm90::NvFormat>; }

}  // namespace transformer_plugin::gemm
