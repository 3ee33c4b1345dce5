// How Hopper's grouped products are laid out. Pure functions of what the host knows without reading a size: they look
// at no pointer and need no GPU.
#pragma once

#include "gemm/args/kernel_args.h"

namespace transformer_plugin::gemm {

namespace hopper {
inline constexpr int kTileRows = 128, kTileColumns = 256;
inline constexpr int kCluster = 2;  // blocks, each of which fills a multiprocessor
// Of sums that are added to memory: which of the 8 boxes of 32 columns threads add, the others the copy engine; or none.
inline constexpr uint32_t kHalfOfBoxes = 0b10101010, kMostBoxes = 0b11101110;
}  // namespace hopper

struct HopperPlan {
  bool takes = false;  // if not, the rest is 0
  int clusters = 0;
  uint32_t thread_boxes = 0;  // as above
};

int64_t bytes_of(DType dtype);

// What hopper_takes (gemm/sm90/launch.h) asks of dtypes, sizes and strides.
bool hopper_takes_shape(GroupedMode mode, const GroupedKernelArgs& args);

HopperPlan hopper_plan(GroupedMode mode, const GroupedKernelArgs& args, int multiprocessors);

// Whether rows of MXFP8 and NVFP4 are widened beside the products (gemm/sm90/microscaled/dequantize_b_prepass.cuh), or by a kernel before; others are not
// widened.
bool widens_beside(const GroupedKernelArgs& args, const HopperPlan& plan);

}  // namespace transformer_plugin::gemm
