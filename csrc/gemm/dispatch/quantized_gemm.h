// GEMMs of quantized operands by kernels that read the quantized data. FP8 with scales of blocks, rows or groups: FP8 tensor cores,
// every 128 products added in FP32. MXFP8 and NVFP4: FP32 sums of exact products; the rows are dequantized to BF16 first. Where
// these kernels do not run, operands are dequantized (gemm/dispatch/quantized_operands.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "common/quantized.h"
#include "gemm/args/kernel_args.h"

namespace transformer_plugin::gemm {

// Operands are K-major, with scales as in quantize/args/layout.h; scales of groups are [G], or [1] without offsets, and those of
// rows [T] and [G, N], or [N]. The amaxes of NVFP4 are part of alpha.

// out[i] = a[i] @ b[g]^T * alpha[g] + bias_scale[i] * bias[g] for the rows i of group g, rounded once; zero past the last
// group. With `beta`, beta[g] * out[i] is added before the rounding, and rows past the last group stay unchanged. With `list`,
// its matrices replace those of `b`, which then is the first of them; not for MXFP8 and NVFP4.
struct QuantizedGemm {
  OperandScaling scales;
  const Quantized& a;                           // [T, K], blocks of 1x128
  const Quantized& b;                           // [G, N, K], blocks of 128x128; or [N, K] without offsets
  const std::optional<at::Tensor>& offsets;     // int32 [G + 1]; without, all rows are one group
  const std::optional<at::Tensor>& bias;        // [G, N] or [N], any float dtype
  const std::optional<at::Tensor>& bias_scale;  // float32 [T]
  std::optional<at::Tensor> alpha;              // float32 [G]
  const std::optional<at::Tensor>& beta;        // float32 [G]; what `out` holds is not read where it is 0
  LaunchOptions options = {};
  at::TensorList list = {};  // [N, K] of each group, or none; the scales of `b` are then those of all
  bool zero_tail = true;     // without it rows past the last group are not written
};

// out[g] = grad[g] @ input[g]^T * alpha[g], added to out[g] if `accumulate`, or to beta[g] * out[g]; the sum runs over the
// columns of the group.
struct QuantizedWgrad {
  OperandScaling scales;
  const Quantized& grad;                     // [N, T], blocks of 1x128 that begin at each group
  const Quantized& input;                    // [K, T], the same
  const std::optional<at::Tensor>& offsets;  // int32 [G + 1]; without, all columns are one group
  std::optional<at::Tensor> alpha;           // float32 [G]
  const std::optional<at::Tensor>& beta;     // float32 [G], not together with `accumulate`
  LaunchOptions options = {};

  // Groups are aligned (quantize/args/layout.h); T is the aligned length.
  bool aligned() const { return offsets && grad.format.aligned_groups; }
};

// The scale granularity if the formats are a pair that QuantizedGemm, or QuantizedWgrad, supports.
std::optional<OperandScaling> quantized_gemm_scales(const Format& a, const Format& b);
std::optional<OperandScaling> quantized_wgrad_scales(const Format& grad, const Format& input);

// Whether the device of `like` has such kernels.
bool has_quantized_kernels(const at::Tensor& like);

// Both return false, and write nothing, if no kernel supports the problem.
// `out` [T, N] has inner stride 1.
bool run_quantized_gemm_out(const QuantizedGemm& product, const at::Tensor& out);
// `out`: [G, N, K], or [N, K] without offsets; or one [N, K] for each group, all with one row stride.
bool run_quantized_wgrad_out(const QuantizedWgrad& reduction, at::TensorList out, bool accumulate);

bool has_quantized_kernels_cuda(const at::Tensor& like);
bool quantized_gemm_out_cuda(const QuantizedGemm& product, const at::Tensor& out);
bool quantized_wgrad_out_cuda(const QuantizedWgrad& reduction, at::TensorList out, bool accumulate);

}  // namespace transformer_plugin::gemm
