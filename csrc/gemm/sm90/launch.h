// Grouped products with the instructions that only Hopper has: copies of whole tiles into shared memory that a cluster of
// blocks shares, and products of warpgroups. A few blocks walk through the tiles of all groups, whose places they find from
// the offsets on the device.
#pragma once

#include "gemm/sm90/config.h"

namespace transformer_plugin::gemm {

#ifdef TRANSFORMER_PLUGIN_SM90A
inline constexpr bool kBuiltForSm90a = true;
#else
inline constexpr bool kBuiltForSm90a = false;  // these kernels hold nothing
#endif

// Launches one kernel, configured as sm90_config says, on a stream.
using Launcher = void (*)(const GroupedGemmArgs& args, const Sm90Config& config, void* stream);

// The launcher of a problem that sm90_unsupported_shape has nothing against.
Launcher sm90_launcher(GemmDirection direction, const GroupedGemmArgs& args);

// Each is in a file of its own in instantiate/, so that they compile in parallel.
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

}  // namespace transformer_plugin::gemm
