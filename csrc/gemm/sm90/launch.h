// Grouped products with the instructions that only Hopper has: copies of whole tiles into shared memory that a cluster of
// blocks shares, and products of warpgroups. A few blocks walk through the tiles of all groups, whose places they find from
// the offsets on the device.
#pragma once

#include "gemm/sm90/config.h"

namespace transformer_plugin::gemm {

#ifdef TRANSFORMER_PLUGIN_SM90A
inline constexpr bool kBuiltForHopper = true;
#else
inline constexpr bool kBuiltForHopper = false;  // these kernels hold nothing
#endif

// Whether these kernels take the product: built for it, on a Hopper, rows of operands and of the output that are whole
// 16 bytes; 16-bit operands into their own dtype or weight gradients into float32; and FP8 into bfloat16 or weight gradients
// into float32, of which kWeightGrad takes a [m, T] and b [n, T]. FP8 under scales of blocks is E4M3: `a` of kForward has
// scales of 1x128 [ceil(k / 128), up4(T)] and `b` of 128x128 [G, ceil(n / 128), up4(ceil(k / 128))]; both operands of
// kWeightGrad have scales of 1x128 [ceil(T / 128) + G, up4(m)] and [.., up4(n)], those of a group after those of the groups
// before it. Under scales of groups, [G] each, `a` may be E5M2; so it may under those of rows, [T] and [G, n], which only
// kForward takes. It takes MXFP8, either operand E4M3 or E5M2, and NVFP4 too, which it decodes, with scales in lines or in
// tiles (gemm/sm90/microscaled/scale_layout.h) and k a multiple of 32; the amaxes of NVFP4 are left to alpha. Without offsets all rows are one
// group. The device of the stream is the current one.
bool is_hopper(int device);
bool hopper_takes(GroupedMode mode, const GroupedKernelArgs& args);
void launch_hopper(GroupedMode mode, const GroupedKernelArgs& args, void* stream);
// The plan for the current device.
HopperPlan plan_here(GroupedMode mode, const GroupedKernelArgs& args);

// One for each kind of product, each in a file of its own so that they compile side by side.
void launch_hopper_forward(const GroupedKernelArgs& args, const HopperPlan& plan, void* stream);
void launch_hopper_blocks(const GroupedKernelArgs& args, const HopperPlan& plan, void* stream);
void launch_hopper_codes(const GroupedKernelArgs& args, const HopperPlan& plan, void* stream);
void launch_hopper_rowwise(const GroupedKernelArgs& args, const HopperPlan& plan, void* stream);
void launch_hopper_mx(const GroupedKernelArgs& args, const HopperPlan& plan, void* stream);
void launch_hopper_nv(const GroupedKernelArgs& args, const HopperPlan& plan, void* stream);
void launch_hopper_data_grad(const GroupedKernelArgs& args, const HopperPlan& plan, void* stream);
void launch_hopper_weight_grad(const GroupedKernelArgs& args, const HopperPlan& plan, void* stream);
void launch_hopper_weight_grad_float(const GroupedKernelArgs& args, const HopperPlan& plan, void* stream);
void launch_hopper_weight_grad_blocks(const GroupedKernelArgs& args, const HopperPlan& plan, void* stream);
void launch_hopper_weight_grad_codes(const GroupedKernelArgs& args, const HopperPlan& plan, void* stream);

}  // namespace transformer_plugin::gemm
