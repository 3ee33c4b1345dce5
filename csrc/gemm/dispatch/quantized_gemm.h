// Products of codes without a widened copy of the weights in memory. FP8 under the scales of blocks of 128, of rows or of whole
// groups: sums of 128 products as tensor cores make them, added in FP32. MXFP8 and NVFP4: FP32 sums of exact products, for which
// the rows are widened first. Where no kernel does that, the values are multiplied instead (gemm/dispatch/dequantized_operands.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "common/format.h"
#include "gemm/args/kernel_args.h"

namespace transformer_plugin::gemm {

// Codes, the dimension that is summed over last, under scales as quantize/args/layout.h has them; of whole groups [G], or [1]
// without offsets. The amaxes of NVFP4 are part of alpha.
struct QuantizedMatrix {
  const at::Tensor &data, &scale;
  bool tiled = false;  // scales of one byte, of MXFP8 and NVFP4, are in tiles
};

// out[i] = a[i] @ b[g]^T * alpha[g] + bias_scale[i] * bias[g] for the rows i of group g, rounded once; zero past the last
// group. With `beta`, beta[g] * out[i] is added before the rounding, and what is past the last group stays as it is. With `list`,
// its matrices stand for those of `b`, which then is the first of them; MXFP8 and NVFP4 take none yet.
struct QuantizedGemm {
  ScaleGranularity scales;
  QuantizedMatrix a;                            // [T, K], blocks of 1x128
  QuantizedMatrix b;                            // [G, N, K], blocks of 128x128; or [N, K] without offsets
  const std::optional<at::Tensor>& offsets;     // int32 [G + 1]; without, all rows are one group
  const std::optional<at::Tensor>& bias;        // [G, N] or [N], any float dtype
  const std::optional<at::Tensor>& bias_scale;  // float32 [T]
  const std::optional<at::Tensor>& alpha;       // float32 [G]
  const std::optional<at::Tensor>& beta;        // float32 [G]; what `out` holds is not read where it is 0
  LaunchOptions options = {};
  at::TensorList list = {};  // [N, K] of each group, or none; the scales of `b` are then those of all
};

// out[g] = grad[g] @ input[g]^T * alpha[g], added to what is there when `accumulate`, or to beta[g] times that; the sum runs over
// the group's columns.
struct QuantizedWgrad {
  ScaleGranularity scales;
  QuantizedMatrix grad;                      // [N, T], blocks of 1x128 that begin anew in each group
  QuantizedMatrix input;                     // [K, T], the same
  const std::optional<at::Tensor>& offsets;  // int32 [G + 1]; without, all columns are one group
  const std::optional<at::Tensor>& alpha;    // float32 [G]
  const std::optional<at::Tensor>& beta;     // float32 [G], not beside `accumulate`
  LaunchOptions options = {};
  bool aligned =
      false;  // groups begin where quantize/args/layout.h has aligned lines; T is the length of those
};

// How the scales of operands in these formats lie, if they are those of an QuantizedGemm or of an QuantizedWgrad.
std::optional<ScaleGranularity> quantized_gemm_scales(const Format& a, const Format& b);
std::optional<ScaleGranularity> quantized_wgrad_scales(const Format& grad, const Format& input);

// Whether the device of `like` has kernels for codes.
bool has_quantized_kernels(const at::Tensor& like);

// False, and nothing is written, where no kernel takes it. `out` [T, N] has inner stride 1,
bool run_quantized_gemm_out(const QuantizedGemm& product, const at::Tensor& out);
// as [G, N, K], or [N, K] without offsets.
bool run_quantized_wgrad_out(const QuantizedWgrad& reduction, const at::Tensor& out, bool accumulate);

bool has_quantized_kernels_cuda(const at::Tensor& like);
bool quantized_gemm_out_cuda(const QuantizedGemm& product, const at::Tensor& out);
bool quantized_wgrad_out_cuda(const QuantizedWgrad& reduction, const at::Tensor& out, bool accumulate);

}  // namespace transformer_plugin::gemm
