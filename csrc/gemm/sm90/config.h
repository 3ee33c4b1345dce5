// Launch configuration of the Hopper grouped GEMM kernels. Pure functions of what the host knows without
// reading group sizes: they dereference no pointer and need no GPU.
#pragma once

#include <optional>

#include "gemm/args/kernel_args.h"

namespace transformer_plugin {
struct Format;
}

namespace transformer_plugin::gemm {

struct GemmDesc;

namespace sm90 {
inline constexpr int kTileRows = 128, kTileColumns = 256;  // output tile of a CTA
inline constexpr int kCluster = 2;                         // CTAs, one for each SM
// Weight gradients with `accumulate` (wgrad/accumulate_epilogue.cuh): bit i is set if threads add the i-th
// box of 32 columns; TMA adds the others.
inline constexpr uint32_t kThreadsAddHalf = 0b10101010, kThreadsAdd6Of8 = 0b11101110;
}  // namespace sm90

struct Sm90Config {
  int clusters = 0;
  uint32_t boxes_added_by_threads = 0;  // 0, kThreadsAddHalf or kThreadsAdd6Of8
  // MXFP8 and NVFP4: the rows are dequantized within the GEMM kernel, by warps that are otherwise idle, and not
  // by a kernel before it (microscaled/dequantize_b_prepass.cuh). False for other formats.
  bool overlaps_dequantize = false;
};

constexpr int64_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return 4;
    case DType::kBFloat16:
    case DType::kFloat16: return 2;
    default: return 1;
  }
}

// How the scales of a pair of formats go together, if the kernels multiply it in this direction.
std::optional<OperandScaling> operand_scaling(GemmDirection direction, const Format& a, const Format& b);

// Why the kernels do not support these dtypes, sizes and strides; null if they do. Rows of operands and of
// the output are multiples of 16 bytes. 16-bit operands give outputs of their own dtype, or FP32 weight
// gradients. Quantized operands, whose formats have an operand_scaling, give BF16 outputs, or FP32 weight
// gradients; for kWgrad they are a [m, T] and b [n, T]. By scaling:
// - kBlock: E4M3. kFprop: `a` has scales of 1x128 blocks [ceil(k / 128), up4(T)], `b` of 128x128 blocks [G,
//   ceil(n / 128), up4(ceil(k / 128))], where up4 rounds up to a multiple of 4. kWgrad: both operands have
//   scales of 1x128 blocks, [ceil(T / 128) + G, up4(m)] and [.., up4(n)], those of a group after those of the
//   groups before it.
// - kGroup: one scale for each group, [G] each. kRow: [T] and [G, n], kFprop only. `a` may be E5M2.
// - kMx: MXFP8, each operand E4M3 or E5M2. kNv: NVFP4. k is a multiple of 32; kFprop only. The kernels
//   dequantize both operands; scales are row-major or tiled (microscaled/scale_layout.h), and the amaxes of
//   NVFP4 are part of alpha.
// Without offsets all rows are one group.
const char* sm90_unsupported_shape(const GemmDesc& desc);

// Of a problem that the kernels support.
Sm90Config sm90_config(const GemmDesc& desc, int multiprocessors);

}  // namespace transformer_plugin::gemm
