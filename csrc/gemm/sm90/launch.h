// Launchers of the grouped GEMM kernels for Hopper (sm_90a): persistent, warp-specialized kernels with TMA,
// WGMMA and clusters of two CTAs.
#pragma once

#include "gemm/sm90/config.h"

namespace transformer_plugin::gemm {

#ifdef TRANSFORMER_PLUGIN_SM90A
inline constexpr bool kBuiltForSm90a = true;
#else
inline constexpr bool kBuiltForSm90a = false;  // the kernels are empty
#endif

// Launches one kernel, configured by sm90_config, on a stream.
using Launcher = void (*)(const GroupedGemmArgs& args, const Sm90Config& config, void* stream);

// The launcher for a problem that sm90_unsupported_shape accepts.
Launcher sm90_launcher(GemmDirection direction, const GroupedGemmArgs& args);

// Launchers by direction, operand format and dtypes. Each is instantiated in its own file in instantiate/, so
// that they compile in parallel.
Launcher fprop_16bit(DType dtype);
Launcher fprop_fp8_block();
Launcher fprop_fp8_tensor(DType a);
Launcher fprop_fp8_row(DType a);
Launcher fprop_mxfp8(DType a, DType b);
Launcher fprop_nvfp4();
Launcher dgrad_16bit(DType dtype);
Launcher wgrad_16bit(DType dtype);
Launcher wgrad_16bit_fp32_out(DType dtype);
Launcher wgrad_fp8_block(DType out);
Launcher wgrad_fp8_tensor(DType grad, DType out);

namespace sm90 {
inline unsigned grid_blocks(const Sm90Config& config) {
  return static_cast<unsigned>(config.clusters * kCluster);
}
}  // namespace sm90

}  // namespace transformer_plugin::gemm
