// Grouped products on Hopper that end in SwiGLU or in its gradient (activation/swiglu.h), before sums leave registers. The
// product is rounded first, as if it had gone to memory.
#pragma once

#include "gemm/sm90/launch.h"
#include "quantize/args/quantize.h"

namespace transformer_plugin::gemm {

// act[i] = swiglu(h[i]) * probs[i] of h = a[i] @ b[g]^T + bias[g]. `interleaved`: h holds 32 columns of the gate and 32 of the
// linear part in turn, else all of the gate first.
struct SwigluKernelArgs {
  GroupedKernelArgs product;  // kForward; n is 2F, and `out` is h [T, 2F], or null where h is not kept
  void* act;                  // [T, F], in the dtype of h
  const float* probs;         // [T], or null for 1
  bool interleaved;
};

// The same, act as codes: its rows as one matrix quantized along rows, in blocks of 128 (ScaleMode::kRows) or of 32 (kMx).
struct SwigluQuantizeKernelArgs {
  SwigluKernelArgs swiglu;  // without `act`
  quantize::QuantizeArgs codes;
};

// The gradients of h and probs from that of act, which is a[i] @ b[g].
struct SwigluBackwardKernelArgs {
  GroupedKernelArgs product;  // kDataGrad; n is F, and `out` the gradient of h [T, 2F]
  const void* h;              // [T, 2F]
  const float* probs;         // [T], or null for 1
  float* partial;  // [ceil(F / 128), T]: the terms of probs' gradient, summed over 128 columns; or null
  bool interleaved;
};

// Whether these kernels take it: a product that hopper_takes, F a multiple of 8 (32 if interleaved), all aligned.
bool hopper_takes_swiglu(const SwigluKernelArgs& args);
bool hopper_takes_swiglu(const SwigluBackwardKernelArgs& args);

// One for each order of columns, and for each kind of scales; the gradient for both orders. Each is in a file of its own so that
// they compile side by side.
void launch_hopper_swiglu(const SwigluKernelArgs& args, void* stream);
void launch_hopper_swiglu_interleaved(const SwigluKernelArgs& args, void* stream);
void launch_hopper_swiglu_quantize(const SwigluQuantizeKernelArgs& args, void* stream);
void launch_hopper_swiglu_quantize_interleaved(const SwigluQuantizeKernelArgs& args, void* stream);
void launch_hopper_swiglu_quantize_mx(const SwigluQuantizeKernelArgs& args, void* stream);
void launch_hopper_swiglu_quantize_mx_interleaved(const SwigluQuantizeKernelArgs& args, void* stream);
void launch_hopper_swiglu_backward(const SwigluBackwardKernelArgs& args, void* stream);

}  // namespace transformer_plugin::gemm
