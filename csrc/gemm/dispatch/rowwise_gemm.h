// GEMM and grouped GEMM of FP8 operands with one scale for each row of both, where no kernel reads the
// quantized data: FP32 sums of exact products, then the scales.
#pragma once

#include "gemm/args/gemm_problem.h"

namespace transformer_plugin::gemm {

// out[i, n] = sum over k of a[i, k] * b[g, n, k], then as rowwise_scales.h says, for the rows i of group g: a
// is E4M3 or E5M2, b E4M3 and transposed. Plus beta[g] * out.
at::Tensor run_rowwise_gemm(const GemmProblem& problem, at::ScalarType dtype, at::TensorList out);

}  // namespace transformer_plugin::gemm
