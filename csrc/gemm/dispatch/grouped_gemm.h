// Products over ragged groups of rows, by device: what grouped_gemm, its gradients and its quantized forms run.
#pragma once

#include "gemm/args/grouped_gemm.h"

namespace transformer_plugin::gemm {

at::Tensor row_product(const RowProduct& product, at::ScalarType dtype);
// `out` [T, N] has inner stride 1; written through its pointer, so that its version does not change.
void row_product_out(const RowProduct& product, const at::Tensor& out);
at::Tensor reduction_product(const ReductionProduct& product, at::ScalarType dtype);
// `out` [G, N, K], likewise.
void reduction_product_out(const ReductionProduct& product, const at::Tensor& out, bool accumulate);
// `out` is a list of matrices [N, K], one for each group, all with one row stride.
void reduction_product_list_out(const ReductionProduct& product, at::TensorList out, bool accumulate);

// The stack [G, .., ..] that matrices of one size are views of, at equal distances.
std::optional<at::Tensor> as_stack(at::TensorList matrices);

at::Tensor row_product_cuda(const RowProduct& product, at::ScalarType dtype);
void row_product_out_cuda(const RowProduct& product, const at::Tensor& out);
at::Tensor reduction_product_cuda(const ReductionProduct& product, at::ScalarType dtype);
void reduction_product_out_cuda(const ReductionProduct& product, const at::Tensor& out, bool accumulate);
void reduction_product_list_out_cuda(const ReductionProduct& product, at::TensorList out, bool accumulate);

}  // namespace transformer_plugin::gemm
