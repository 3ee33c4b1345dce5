// From a problem to what the choice of its kernel reads, and to the arguments of that kernel.
#pragma once

#include "gemm/args/gemm_desc.h"
#include "gemm/args/gemm_problem.h"

namespace transformer_plugin::gemm {

// `out`: what the product is written to, one tensor or, for kWgrad, a matrix for each group; none for a new
// tensor.
GemmDesc describe_gemm(const GemmProblem& problem, at::ScalarType dtype, at::TensorList out);

// The matrices of `out` lie apart.
inline bool is_out_list(const GemmProblem& problem, at::TensorList out) {
  return problem.is_wgrad() && !problem.is_dense() && !out.empty() && out[0].dim() == 2;
}

// The stride of a single row is arbitrary, so it is replaced by the width.
inline int64_t row_stride(const at::Tensor& matrix) {
  return matrix.size(0) > 1 ? matrix.stride(0) : matrix.size(1);
}

// The sizes, strides, dtypes and options, without a pointer.
GroupedGemmArgs args_of(const GemmDesc& desc);

}  // namespace transformer_plugin::gemm
