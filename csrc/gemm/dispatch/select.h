// Which kernel multiplies, and what must be copied for it: one pure function from a description of the problem
// and of the GPU, so that it can be tested and printed where there is none.
#pragma once

#include <ATen/core/Tensor.h>

#include "gemm/args/gemm_desc.h"
#include "gemm/sm90/config.h"

namespace transformer_plugin::gemm {

enum class Backend : int32_t {
  kTorch,           // at::_grouped_mm
  kSm90,            // gemm/sm90: TMA and WGMMA
  kSm90Gather,      // the same, rows of `a` loaded through an index
  kSm90Activation,  // the same, an activation in the epilogue; with an index and no copy, rows loaded through it
  kGeneric,         // gemm/generic: mma.sync or FMA; any shape, FP32, BF16 and FP16
  kSteps,  // no kernel computes it as a whole: operands are dequantized first, or the activation follows the product
};

// What is copied before the kernel runs, besides what is not contiguous.
enum class GemmCopy : int32_t {
  kNone,
  kTakeRows,        // the rows that an index names
  kStack,           // the matrices of a list, into one tensor
  kAlignGroups,     // the groups that begin at no multiple of 16 bytes (gemm/sm90/align_groups.h)
  kAlignAllGroups,  // all groups, because the rows themselves are no multiple of 16 bytes
  kDequantize,      // both operands, in a dtype in which they are exact
};

struct GpuDesc {
  int capability;  // major and minor, for example 90
  int multiprocessors;
  bool has_sm90a_kernels;  // whether the library was built with them
};

// Whether weight gradients with this many columns, those of the input, load rows of the gradient by their
// index. A copy of them costs the same for any number of columns; loads are repeated for every 256. A
// backward of a layer on an H100 is 2 % faster without the copy for 768 columns and 1 % slower for 2048.
constexpr bool gathers_wgrad(int64_t columns) { return columns <= 1024; }

struct Selection {
  Backend backend;
  // Why not a backend before it in the order of preference; for the first one, what it needs.
  const char* reason;
  GemmCopy copy = GemmCopy::kNone;
  // That of the description, or kWgrad for a dense product that is one.
  GemmDirection direction = GemmDirection::kFprop;
  Sm90Config config = {};  // of the kSm90 backends
};

// Never fails: kGeneric or kSteps take what the others do not.
Selection select_gemm(const GemmDesc& desc, const GpuDesc& gpu);

// A dense product a @ b^T as a weight gradient of one group, which sums over the columns of both operands.
GemmDesc as_wgrad(GemmDesc desc);

const char* backend_name(Backend backend);

// The device of a tensor; a CPU has no capability.
GpuDesc gpu_of(const at::Tensor& tensor);
// Whether it has kernels that read quantized data.
bool has_quantized_kernels(const at::Tensor& like);

}  // namespace transformer_plugin::gemm
