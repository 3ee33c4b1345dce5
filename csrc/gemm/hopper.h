// Grouped products with the instructions that only Hopper has: copies of whole tiles into shared memory that a cluster of
// blocks shares, and products of warpgroups. A few blocks walk through the tiles of all groups, whose places they find from
// the offsets on the device.
#pragma once

#include "gemm/grouped_kernel.h"

namespace transformer_plugin::gemm {

#ifdef TRANSFORMER_PLUGIN_SM90A
inline constexpr bool kBuiltForHopper = true;
#else
inline constexpr bool kBuiltForHopper = false;  // these kernels hold nothing
#endif

// Whether these kernels take the product: built for it, on a Hopper, no beta, rows of operands and of the output that are whole
// 16 bytes, those of kForward and kDataGrad's output back to back, 16-bit operands into their own dtype or weight gradients into
// float32, and kForward of E4M3 in blocks into bfloat16:
// `a` under scales of 1x128 [ceil(k / 128), up4(T)], `b` under scales of 128x128 [G, ceil(n / 128), up4(ceil(k / 128))]. The
// device of the stream is the current one.
bool hopper_takes(GroupedMode mode, const GroupedKernelArgs& args);
void launch_hopper(GroupedMode mode, const GroupedKernelArgs& args, void* stream);

// One for each kind of product, each in a file of its own so that they compile side by side.
void launch_hopper_forward(const GroupedKernelArgs& args, void* stream);
void launch_hopper_blocks(const GroupedKernelArgs& args, void* stream);
void launch_hopper_data_grad(const GroupedKernelArgs& args, void* stream);
void launch_hopper_weight_grad(const GroupedKernelArgs& args, void* stream);
void launch_hopper_weight_grad_float(const GroupedKernelArgs& args, void* stream);

}  // namespace transformer_plugin::gemm
