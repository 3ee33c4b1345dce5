// How Hopper's grouped products are laid out. Pure functions of what the host knows without reading a size: they look
// at no pointer and need no GPU.
#pragma once

#include "gemm/args/kernel_args.h"

namespace transformer_plugin::gemm {

namespace sm90 {
inline constexpr int kTileRows = 128, kTileColumns = 256;
inline constexpr int kCluster = 2;  // blocks, each of which fills a multiprocessor
// Of sums that are added to memory: which of the 8 boxes of 32 columns threads add, the others the copy engine; or none.
inline constexpr uint32_t kHalfOfBoxes = 0b10101010, kMostBoxes = 0b11101110;
}  // namespace sm90

struct Sm90Config {
  bool takes = false;  // if not, the rest is 0
  int clusters = 0;
  uint32_t thread_boxes = 0;  // as above
};

int64_t bytes_of(DType dtype);

// Why the kernels do not take these dtypes, sizes and strides; null where they do. They take rows of operands and of the output
// that are multiples of 16 bytes; 16-bit operands into their own dtype, or weight gradients into FP32; and quantized operands
// into BF16, or weight gradients into FP32, of which kWgrad takes a [m, T] and b [n, T].
// - kBlock is E4M3: `a` of kFprop has scales of 1x128 [ceil(k / 128), up4(T)] and `b` of 128x128 [G, ceil(n / 128),
//   up4(ceil(k / 128))]; both operands of kWgrad have scales of 1x128 [ceil(T / 128) + G, up4(m)] and [.., up4(n)], those of a
//   group after those of the groups before it.
// - kGroup has one scale a group, [G] each; kRow has [T] and [G, n], kFprop only. `a` may be E5M2.
// - kMx is MXFP8, each operand E4M3 or E5M2, and kNv NVFP4, with k a multiple of 32, kFprop only. The kernels dequantize both;
//   scales are row by row or tiled (gemm/sm90/microscaled/scale_layout.h), and the amaxes of NVFP4 are part of alpha.
// Without offsets all rows are one group.
const char* sm90_unsupported_shape(GemmDirection direction, const GroupedGemmArgs& args);

Sm90Config sm90_config(GemmDirection mode, const GroupedGemmArgs& args, int multiprocessors);

// Whether rows of MXFP8 and NVFP4 are widened beside the products (gemm/sm90/microscaled/dequantize_b_prepass.cuh), or by a kernel before; others are not
// widened.
bool overlaps_dequantize(const GroupedGemmArgs& args, const Sm90Config& plan);

}  // namespace transformer_plugin::gemm
