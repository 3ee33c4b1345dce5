// Products over ragged groups of rows, by device: what grouped_gemm, its gradients and its quantized forms run.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace transformer_plugin::gemm {

// out[i] = a[i] @ B_g * alpha[g] + bias_scale[i] * bias[g] for the rows i of group g, rounded once; zero past the
// last group, whose rows of `a` are not read. B_g is b[g] transposed (b [G, N, K]) or as stored (b [G, K, N]).
// With `beta`, beta[g] * out[i] is added before the rounding, and what is past the last group stays as it is.
// With `rows`, a[rows[i]] stands for a[i].
struct RowProduct {
  const at::Tensor& a;                          // [T, K], or any rows of K
  const at::Tensor& b;                          // [G, N, K] or [G, K, N]
  const at::Tensor& offsets;                    // int32 [G + 1] (common/offsets.h)
  const std::optional<at::Tensor>& bias;        // [G, N], any float dtype
  const std::optional<at::Tensor>& bias_scale;  // float32 [T]
  bool transpose_b;
  std::optional<at::Tensor> alpha = std::nullopt;  // float32 [G]
  std::optional<at::Tensor> beta = std::nullopt;   // float32 [G]; what `out` holds is not read where it is 0
  std::optional<at::Tensor> rows = std::nullopt;   // int32 or int64 [T] (common/row_index.h)

  int64_t columns() const { return b.size(transpose_b ? 1 : 2); }
};

// out[g] = grad_g^T @ input_g * alpha[g], added to what is there when `accumulate`, or to beta[g] times that; the sum runs
// over the group's rows. With `input_rows`, input[input_rows[i]] stands for input[i].
struct ReductionProduct {
  const at::Tensor& grad;                               // [T, N]
  const at::Tensor& input;                              // [T, K], or any rows of K
  const at::Tensor& offsets;                            // int32 [G + 1]
  std::optional<at::Tensor> alpha = std::nullopt;       // float32 [G]
  std::optional<at::Tensor> beta = std::nullopt;        // float32 [G], not beside `accumulate`
  std::optional<at::Tensor> input_rows = std::nullopt;  // int32 or int64 [T]

  int64_t groups() const { return offsets.size(0) - 1; }
};

// The same of E4M3 codes, `a` [T, K] in blocks of 1x128 and `b` [G, N, K] in blocks of 128x128 (FP32 scales as
// quantize/tiles.h has them), multiplied as they are: sums of 128 of K as tensor cores make them, added in FP32 under their scales.
struct BlockProduct {
  const at::Tensor &a, &a_scale;
  const at::Tensor &b, &b_scale;
  const at::Tensor& offsets;
  const std::optional<at::Tensor>& bias;
  const std::optional<at::Tensor>& bias_scale;
  const std::optional<at::Tensor>& alpha;
  const std::optional<at::Tensor>& beta;
};
// Into `out` as row_product_out; false, and nothing is written, where no kernel takes it.
bool block_product_out(const BlockProduct& product, const at::Tensor& out);

at::Tensor row_product(const RowProduct& product, at::ScalarType dtype);
// `out` [T, N] has inner stride 1; written through its pointer, so that its version does not change.
void row_product_out(const RowProduct& product, const at::Tensor& out);
at::Tensor reduction_product(const ReductionProduct& product, at::ScalarType dtype);
// `out` [G, N, K], likewise.
void reduction_product_out(const ReductionProduct& product, const at::Tensor& out, bool accumulate);

void row_product_cpu(const RowProduct& product, const at::Tensor& out);  // without beta
void reduction_product_cpu(const ReductionProduct& product, const at::Tensor& out, bool accumulate);
bool block_product_out_cuda(const BlockProduct& product, const at::Tensor& out);
at::Tensor row_product_cuda(const RowProduct& product, at::ScalarType dtype);
void row_product_out_cuda(const RowProduct& product, const at::Tensor& out);
at::Tensor reduction_product_cuda(const ReductionProduct& product, at::ScalarType dtype);
void reduction_product_out_cuda(const ReductionProduct& product, const at::Tensor& out, bool accumulate);

}  // namespace transformer_plugin::gemm
