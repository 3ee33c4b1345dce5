// Forward, FP8 with scales of 1x128 and 128x128 blocks.
#include "gemm/sm90/grouped_gemm.cuh"

namespace transformer_plugin::gemm {

Launcher fprop_fp8_block() { return sm90::launch_grouped_gemm<sm90::MainloopFp8Block>; }

}  // namespace transformer_plugin::gemm
