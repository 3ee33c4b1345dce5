// Grouped products on Hopper that end in SwiGLU or in its gradient (activation/swiglu.h), before sums leave registers. The
// product is rounded first, as if it had gone to memory.
#pragma once

#include "gemm/sm90/launch.h"
#include "quantize/args/quantize.h"

namespace transformer_plugin::gemm {

// act[i] = swiglu(h[i]) * probs[i] of h = a[i] @ b[g]^T + bias[g]. `interleaved`: h holds 32 columns of the gate and 32 of the
// linear part in turn, else all of the gate first.
struct SwigluKernelArgs {
  GroupedGemmArgs product;  // kFprop; n is 2F, and `out` is h [T, 2F], or null where h is not kept
  void* act;                // [T, F], in the dtype of h
  const float* probs;       // [T], or null for 1
  bool interleaved;
};

// The same, act as codes: its rows as one matrix quantized along rows, in blocks of 128 (ScaleMode::kRows) or of 32 (kMx).
struct SwigluQuantizeKernelArgs {
  SwigluKernelArgs swiglu;  // without `act`
  quantize::QuantizeArgs codes;
};

// The gradients of h and probs from that of act, which is a[i] @ b[g].
struct SwigluBackwardKernelArgs {
  GroupedGemmArgs product;  // kDgrad; n is F, and `out` the gradient of h [T, 2F]
  const void* h;            // [T, 2F]
  const float* probs;       // [T], or null for 1
  float* partial;  // [ceil(F / 128), T]: the terms of probs' gradient, summed over 128 columns; or null
  bool interleaved;
};

using SwigluLauncher = void (*)(const SwigluKernelArgs& args, const Sm90Config& config, void* stream);
using SwigluQuantizeLauncher = void (*)(const SwigluQuantizeKernelArgs& args, const Sm90Config& config,
                                        void* stream);
using SwigluBackwardLauncher = void (*)(const SwigluBackwardKernelArgs& args, const Sm90Config& config,
                                        void* stream);
// By the order of columns and the scales; the gradient takes both orders. Each is in a file of its own in instantiate/, so that
// they compile in parallel.
SwigluLauncher swiglu(DType dtype);
SwigluLauncher swiglu_interleaved(DType dtype);
SwigluQuantizeLauncher swiglu_fp8_block(DType dtype);
SwigluQuantizeLauncher swiglu_fp8_block_interleaved(DType dtype);
SwigluQuantizeLauncher swiglu_mxfp8(DType dtype);
SwigluQuantizeLauncher swiglu_mxfp8_interleaved(DType dtype);
SwigluBackwardLauncher swiglu_backward(DType dtype);

}  // namespace transformer_plugin::gemm
