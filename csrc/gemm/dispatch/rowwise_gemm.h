// GEMM and grouped GEMM of FP8 operands with one scale for each row of both, where no kernel reads the quantized data: FP32 sums
// of exact products, then the scales.
#pragma once

#include <optional>

#include "common/quantized.h"
#include "gemm/args/launch_options.h"

namespace transformer_plugin::gemm {

// out[i, n] = sum over k of a[i, k] * b[g, n, k], then as rowwise_scales.h says, for the rows i of group g.
struct RowwiseProduct {
  const Quantized& a;                           // E4M3 or E5M2 [T, K]
  const Quantized& b;                           // E4M3 [G, N, K]; or [N, K] without offsets
  const std::optional<at::Tensor>& offsets;     // int32 [G + 1]
  const std::optional<at::Tensor>& bias;        // [G, N] or [N], any float dtype
  const std::optional<at::Tensor>& bias_scale;  // float32 [T]
  const std::optional<at::Tensor>& alpha;       // float32 [G]
  LaunchOptions options = {};
  bool zero_tail = true;  // without it rows past the last group are not written
};

at::Tensor rowwise_product(const RowwiseProduct& product, at::ScalarType dtype);
// The same plus beta[g] * out; with `beta`, rows past the last group stay unchanged.
void rowwise_product_out(const RowwiseProduct& product, const std::optional<at::Tensor>& beta,
                         const at::Tensor& out);

}  // namespace transformer_plugin::gemm
