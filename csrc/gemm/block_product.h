// Products of E4M3 codes in blocks as they are: sums of 128 products as tensor cores make them, added in FP32 under the
// scales of their blocks. Where no kernel does that, the values are multiplied instead (gemm/quantized.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "common/format.h"
#include "gemm/launch_options.h"

namespace transformer_plugin::gemm {

// Codes, the dimension that is summed over last, under FP32 scales as quantize/tiles.h has them.
struct BlockOperand {
  const at::Tensor &data, &scale;
};

// out[i] = a[i] @ b[g]^T * alpha[g] + bias_scale[i] * bias[g] for the rows i of group g, rounded once; zero past the last
// group. No kernel takes `beta` (gemm/grouped_product.h) yet.
struct BlockProduct {
  BlockOperand a;                               // [T, K], blocks of 1x128
  BlockOperand b;                               // [G, N, K], blocks of 128x128; or [N, K] without offsets
  const std::optional<at::Tensor>& offsets;     // int32 [G + 1]; without, all rows are one group
  const std::optional<at::Tensor>& bias;        // [G, N] or [N], any float dtype
  const std::optional<at::Tensor>& bias_scale;  // float32 [T]
  const std::optional<at::Tensor>& alpha;       // float32 [G]
  const std::optional<at::Tensor>& beta;
  LaunchOptions options = {};
};

// out[g] = grad[g] @ input[g]^T * alpha[g], added to what is there when `accumulate`; the sum runs over the group's columns.
struct BlockReduction {
  BlockOperand grad;                         // [N, T], blocks of 1x128 that begin anew in each group
  BlockOperand input;                        // [K, T], the same
  const std::optional<at::Tensor>& offsets;  // int32 [G + 1]; without, all columns are one group
  const std::optional<at::Tensor>& alpha;    // float32 [G]
  const std::optional<at::Tensor>& beta;
  LaunchOptions options = {};
};

// Whether operands of these formats are those of a BlockProduct, or of a BlockReduction.
bool are_rows_by_squares(const Format& a, const Format& b);
bool are_rows_by_rows(const Format& a, const Format& b);

// Whether the device of `like` has kernels for blocks.
bool has_block_kernels(const at::Tensor& like);

// False, and nothing is written, where no kernel takes it. `out` [T, N] has inner stride 1,
bool block_product_out(const BlockProduct& product, const at::Tensor& out);
// as [G, N, K], or [N, K] without offsets.
bool block_reduction_out(const BlockReduction& reduction, const at::Tensor& out, bool accumulate);

bool has_block_kernels_cuda(const at::Tensor& like);
bool block_product_out_cuda(const BlockProduct& product, const at::Tensor& out);
bool block_reduction_out_cuda(const BlockReduction& reduction, const at::Tensor& out, bool accumulate);

}  // namespace transformer_plugin::gemm
