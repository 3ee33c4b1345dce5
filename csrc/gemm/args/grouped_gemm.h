// Grouped GEMM and weight gradient as the host describes them: operands, groups, epilogue.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

#include "gemm/args/launch_options.h"

namespace transformer_plugin::gemm {

// A stack of quantized matrices [rows, columns] that a CPU dequantizes one at a time, to save memory.
struct QuantizedStack {
  int64_t rows, columns;
  at::ScalarType dtype;  // of the dequantized matrices
  // Writes the dequantized matrix of a group; called by several threads.
  std::function<void(int64_t, const at::Tensor&)> dequantize;
};

// out[i] = a[i] @ B_g * alpha[g] + bias_scale[i] * bias[g] for the rows i of group g, rounded once; zero past
// the last group, or without `zero_tail` anything: those rows of `a` do not affect the result. B_g is b[g] transposed (b [G, N,
// K]) or as stored (b [G, K, N]). With `beta`, beta[g] * out[i] is added before the rounding, and rows past the last group stay
// unchanged. With `rows`, a[rows[i]] replaces a[i]. With `list`, its matrices replace those of `b`, which then is the first of
// them.
struct GroupedGemm {
  const at::Tensor& a;                          // [T, K], or any rows of K
  const at::Tensor& b;                          // [G, N, K] or [G, K, N]
  const at::Tensor& offsets;                    // int32 [G + 1] (common/offsets.h)
  const std::optional<at::Tensor>& bias;        // [G, N], any float dtype
  const std::optional<at::Tensor>& bias_scale;  // float32 [T]
  bool transpose_b;
  std::optional<at::Tensor> alpha = std::nullopt;  // float32 [G]
  std::optional<at::Tensor> beta = std::nullopt;   // float32 [G]; what `out` holds is not read where it is 0
  std::optional<at::Tensor> rows = std::nullopt;   // int32 or int64 [T] (common/row_index.h)
  LaunchOptions options = {};
  const QuantizedStack* quantized_b = nullptr;  // replaces `b`; CPU only
  at::TensorList list = {};                     // [N, K] or [K, N] of each group, or none
  bool zero_tail = true;

  int64_t groups() const { return offsets.size(0) - 1; }
  int64_t capacity() const { return rows ? rows->size(0) : a.size(0); }
  int64_t columns() const {
    if (!list.empty()) return b.size(transpose_b ? 0 : 1);
    if (quantized_b) return transpose_b ? quantized_b->rows : quantized_b->columns;
    return b.size(transpose_b ? 1 : 2);
  }
};

// out[g] [N, K] = grad_g^T @ input_g * alpha[g], added to out[g] if `accumulate`, or to beta[g] * out[g]; the
// sum runs over the group's rows. With `input_rows`, input[input_rows[i]] replaces input[i]; `grad_rows`
// likewise.
struct GroupedWgrad {
  const at::Tensor& grad;                               // [T, N], or any rows of N
  const at::Tensor& input;                              // [T, K], or any rows of K
  const at::Tensor& offsets;                            // int32 [G + 1]
  std::optional<at::Tensor> alpha = std::nullopt;       // float32 [G]
  std::optional<at::Tensor> beta = std::nullopt;        // float32 [G], not together with `accumulate`
  std::optional<at::Tensor> input_rows = std::nullopt;  // int32 or int64 [T] (common/row_index.h)
  std::optional<at::Tensor> grad_rows = std::nullopt;   // likewise
  LaunchOptions options = {};

  int64_t groups() const { return offsets.size(0) - 1; }
  int64_t capacity() const { return grad_rows ? grad_rows->size(0) : grad.size(0); }
};

// On a CPU the caller resolves index and beta.
void grouped_gemm_cpu(const GroupedGemm& product, const at::Tensor& out);
void grouped_wgrad_cpu(const GroupedWgrad& product, at::TensorList out, bool accumulate);

}  // namespace transformer_plugin::gemm
