// Grouped GEMMs on Hopper with a SwiGLU epilogue (activation/swiglu.h). The GEMM's
// result is rounded before the activation, as if it had been stored and read.
#pragma once

#include "common/row_index_args.h"
#include "gemm/sm90/launch.h"
#include "quantize/args/quantize.h"

namespace transformer_plugin::gemm {

// act[i] = swiglu(h[i]) * probs[i] with h = a[i] @ b[g]^T + bias[g]. Columns of h: `interleaved`, 32 of the
// gate and 32 of the linear part in turn; otherwise the gate's first.
struct SwigluKernelArgs {
  GroupedGemmArgs product;  // kFprop; n is 2F, and `out` is h [T, 2F], or null if h is not stored
  void* act;                // [T, F], in the dtype of h
  const float* probs;       // [T], or null for 1
  bool interleaved;
};

// The same with act quantized along rows, as one matrix, in blocks of 1x128 or of 1x32.
struct SwigluQuantizeKernelArgs {
  SwigluKernelArgs swiglu;  // without `act`
  quantize::QuantizeArgs quantized_act;
};

using SwigluLauncher = void (*)(const SwigluKernelArgs& args, const Sm90Config& config, void* stream);
using SwigluQuantizeLauncher = void (*)(const SwigluQuantizeKernelArgs& args, const Sm90Config& config,
                                        void* stream);
// One launcher for each column order and scale format, each instantiated in its own file in instantiate/, so
// that they compile in parallel.
SwigluLauncher swiglu(DType dtype);
SwigluLauncher swiglu_interleaved(DType dtype);
// Rows of `a` taken through an index, as in gather/gather.h.
using SwigluGatherLauncher = void (*)(const SwigluKernelArgs& args, const GatheredRows& rows,
                                      const Sm90Config& config, void* stream);
SwigluGatherLauncher swiglu_gather(DType dtype);
SwigluGatherLauncher swiglu_gather_interleaved(DType dtype);
SwigluQuantizeLauncher swiglu_fp8_block(DType dtype);
SwigluQuantizeLauncher swiglu_fp8_block_interleaved(DType dtype);
SwigluQuantizeLauncher swiglu_mxfp8(DType dtype);
SwigluQuantizeLauncher swiglu_mxfp8_interleaved(DType dtype);

}  // namespace transformer_plugin::gemm
