// A GEMM as the host describes it, of plain or quantized operands: grouped, weight gradient or dense.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "common/quantized.h"
#include "gemm/args/kernel_args.h"
#include "gemm/args/launch_options.h"

namespace transformer_plugin::gemm {

// kFprop, kDgrad: out[i] = a[i] @ B_g * alpha[g] + bias_scale[i] * bias[g] for the rows i of group g, rounded
// once; zero past the last group, or without `zero_tail` anything: those rows of `a` do not affect the
// result. B_g is b[g] transposed (kFprop, b [G, N, K]) or as stored (kDgrad, b [G, K, N]). With `beta`,
// beta[g] * out[i] is added before the rounding, and rows past the last group stay unchanged. Without offsets
// all rows are one group, and the product is dense: b is [N, K] or [K, N].
//
// kWgrad: out[g] [N, K] = a_g^T @ b_g * alpha[g], added to out[g] if `accumulate`, or to beta[g] * out[g], of
// the gradient a [T, N] and the input b [T, K]; the sum runs over the group's rows. Quantized operands are
// transposed: [N, T] and [K, T].
//
// With a row_index in an operand, matrix[row_index[i]] replaces its row i (common/row_index.h); of b only for
// kWgrad.
struct GemmProblem {
  GemmDirection direction;
  Quantized a = {}, b = {};
  at::Tensor offsets = {};                              // int32 [G + 1] (common/offsets.h); undefined: dense
  std::optional<at::Tensor> bias = std::nullopt;        // [G, N] or [N], any float dtype
  std::optional<at::Tensor> bias_scale = std::nullopt;  // float32 [T]
  std::optional<at::Tensor> alpha = std::nullopt;       // float32 [G]
  std::optional<at::Tensor> beta = std::nullopt;  // float32 [G]; what `out` holds is not read where it is 0
  bool accumulate = false;                        // a beta of 1; kWgrad and dense, not together with `beta`
  bool zero_tail = true;
  LaunchOptions options = {};
  at::Tensor group_sizes = {};  // of quantized operands, which are dequantized by them
  // The matrices of b if they are no stack: [N, K] or [K, N] of each group; b.data is then the first.
  at::TensorList list = {};
  // Their scales, then the amaxes of NVFP4.
  at::TensorList list_scales = {};

  bool is_dense() const { return !offsets.defined(); }
  bool is_wgrad() const { return direction == GemmDirection::kWgrad; }
  bool is_quantized() const { return a.format.is_quantized(); }
  int64_t groups() const { return is_dense() ? 1 : offsets.size(0) - 1; }
  // T, the rows of the buffer.
  int64_t rows() const { return a.row_index.defined() ? a.row_index.size(0) : a.data.size(0); }
  // N of kFprop and kDgrad.
  int64_t columns() const {
    return direction == GemmDirection::kFprop ? b.data.size(-2) : b.row_length().expect_int();
  }
};

// On a CPU, of operands without an index and without `beta`; `b` may be quantized, or FP8 values, with a
// plain `a`: it is converted to the dtype of `a`, one matrix at a time to save memory.
void grouped_gemm_cpu(const GemmProblem& problem, const at::Tensor& out);
// `out`: [N, K] of each group.
void grouped_wgrad_cpu(const GemmProblem& problem, at::TensorList out);

}  // namespace transformer_plugin::gemm
