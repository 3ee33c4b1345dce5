// Which kernel multiplies: one pure function from a description of the problem and of the GPU, so that it can be tested and
// printed where there is none.
#pragma once

#include "gemm/sm90/config.h"

namespace transformer_plugin::gemm {

enum class Backend : int32_t {
  kTorch,       // at::_grouped_mm
  kSm90,        // gemm/sm90: TMA and WGMMA
  kSm90Gather,  // the same, rows of `a` loaded through an index
  kSm90Swiglu,  // the same, SwiGLU in the epilogue
  kGeneric,     // gemm/generic: mma.sync or FMA; any shape, FP32, BF16 and FP16
  kSteps,  // no kernel computes it as a whole: operands are dequantized first, or SwiGLU follows the product
};

enum class Epilogue : int32_t { kStore, kSwiglu };

struct GpuDesc {
  int capability;  // major and minor, for example 90
  int multiprocessors;
  bool has_sm90a_kernels;  // whether the library was built with them
};

struct GemmDesc {
  GemmDirection direction;
  const GroupedGemmArgs& args;  // of its pointers none is read
  bool pointers_aligned;        // every pointer of `args`, those of a list too, is a multiple of 16 bytes
  Epilogue epilogue = Epilogue::kStore;
  bool interleaved = false;           // kSwiglu: 32 columns of gate and linear part in turn
  bool index = false;                 // rows of `a` (kWgrad: of the gradient) are named by an index
  bool index_fits_wgrad = false;      // it is int32, and the matrix's rows are less than 2^31 bytes apart
  bool index_matrix_aligned = false;  // the rows of the matrix that it names begin at multiples of 16 bytes
  // No bias, factor, list or given output: at::_grouped_mm has the same meaning.
  bool torch_computes_it = false;
};

// Whether weight gradients with this many columns, those of the input, load rows of the gradient by their index. A copy of
// them costs the same for any number of columns; loads are repeated for every 256. A backward of a layer on an H100 is 2 %
// faster without the copy for 768 columns and 1 % slower for 2048.
constexpr bool gathers_wgrad(int64_t columns) { return columns <= 1024; }

struct Selection {
  Backend backend;
  // Why not a backend before it in the order of preference; for the first one, what it needs.
  const char* reason;
  Sm90Config config;  // of the kSm90 backends
};

// Never fails: kGeneric or kSteps take what the others do not.
Selection select_gemm(const GemmDesc& desc, const GpuDesc& gpu);

const char* backend_name(Backend backend);

#ifdef TRANSFORMER_PLUGIN_CUDA
// The current device.
GpuDesc current_gpu();
// Of the pointers of `args`, for GemmDesc.
bool pointers_aligned(const GroupedGemmArgs& args);
#endif

}  // namespace transformer_plugin::gemm
