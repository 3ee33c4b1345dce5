// GEMM and grouped GEMM of FP8 operands with one scale for each row of both.
#pragma once

#include <optional>

#include "common/check.h"
#include "gemm/args/launch_options.h"

namespace transformer_plugin::gemm {

// out[i, n] = sum over k of a[i, k] * b[g, n, k], then as rowwise_scales.h says, for the rows i of group g.
struct RowwiseProduct {
  const char* op;
  const at::Tensor& a;        // E4M3 or E5M2 [T, K]
  const at::Tensor& a_scale;  // float32 [T]
  const at::Tensor& b;        // E4M3 [G, N, K]; or [N, K] without group sizes
  const at::Tensor& b_scale;  // float32 [G, N], or [N]
  const at::Tensor* group_sizes;
  const std::optional<at::Tensor>& alpha;       // float32 [G]
  const std::optional<at::Tensor>& bias;        // [G, N] or [N], any float dtype
  const std::optional<at::Tensor>& bias_scale;  // float32 [T]
  at::ScalarType dtype;                         // of the output
  LaunchOptions options = {};

  Argument a_argument() const { return {op, "a", a}; }
  c10::SymInt columns() const { return b.sym_size(-2); }
};

void check_rowwise(const RowwiseProduct& product);
// [T, N]: without data, and computed.
at::Tensor rowwise_product_meta(const RowwiseProduct& product);
at::Tensor rowwise_product(const RowwiseProduct& product);

}  // namespace transformer_plugin::gemm
