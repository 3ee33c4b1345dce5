// Grouped GEMMs on Hopper with an activation in the epilogue (activation/functions.h). The GEMM's
// result is rounded before the activation, as if it had been stored and read.
#pragma once

#include "activation/description.h"
#include "common/row_index_args.h"
#include "gemm/sm90/launch.h"
#include "quantize/args/quantize.h"

namespace transformer_plugin::gemm {

// act[i] = activation(h[i]) * probs[i] with h = a[i] @ b[g]^T + bias[g].
struct ActivationKernelArgs {
  GroupedGemmArgs product;  // kFprop; n is 2F, and `out` is h [T, 2F], or null if h is not stored
  void* act;                // [T, F], in the dtype of h
  const float* probs;       // [T], or null for 1
  activation::Activation activation;
};

// The same with act quantized along rows, as one matrix, in blocks of 1x128 or of 1x32.
struct ActivationQuantizeKernelArgs {
  ActivationKernelArgs activation;  // without `act`
  quantize::QuantizeArgs quantized_act;
};

using ActivationLauncher = void (*)(const ActivationKernelArgs& args, const Sm90Config& config, void* stream);
using ActivationQuantizeLauncher = void (*)(const ActivationQuantizeKernelArgs& args,
                                            const Sm90Config& config, void* stream);
// One launcher for each function, column order and scale format, each instantiated in its own file in instantiate/, so
// that they compile in parallel.
ActivationLauncher swiglu(DType dtype);
ActivationLauncher swiglu_interleaved(DType dtype);
// Rows of `a` taken through an index, as in gather/gather.h.
using ActivationGatherLauncher = void (*)(const ActivationKernelArgs& args, const GatheredRows& rows,
                                          const Sm90Config& config, void* stream);
ActivationGatherLauncher swiglu_gather(DType dtype);
ActivationGatherLauncher swiglu_gather_interleaved(DType dtype);
ActivationQuantizeLauncher swiglu_fp8_block(DType dtype);
ActivationQuantizeLauncher swiglu_fp8_block_interleaved(DType dtype);
ActivationQuantizeLauncher swiglu_mxfp8(DType dtype);
ActivationQuantizeLauncher swiglu_mxfp8_interleaved(DType dtype);
ActivationLauncher clamped_swiglu(DType dtype);
ActivationLauncher clamped_swiglu_interleaved(DType dtype);
ActivationGatherLauncher clamped_swiglu_gather(DType dtype);
ActivationGatherLauncher clamped_swiglu_gather_interleaved(DType dtype);
ActivationQuantizeLauncher clamped_swiglu_fp8_block(DType dtype);
ActivationQuantizeLauncher clamped_swiglu_fp8_block_interleaved(DType dtype);
ActivationQuantizeLauncher clamped_swiglu_mxfp8(DType dtype);
ActivationQuantizeLauncher clamped_swiglu_mxfp8_interleaved(DType dtype);

}  // namespace transformer_plugin::gemm
