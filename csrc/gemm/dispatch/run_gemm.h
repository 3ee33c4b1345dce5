// GEMMs on the device of their operands.
#pragma once

#include <optional>

#include "gemm/args/gemm_problem.h"

namespace transformer_plugin::gemm {

// Into a new tensor of `dtype`, or into `out`: one tensor or, for weight gradients, a matrix [N, K] for each
// group, all with one row stride; its dtype is then `dtype`. What is given is written through its pointer, so
// its autograd version does not change.
at::Tensor run_gemm(const GemmProblem& problem, at::ScalarType dtype, at::TensorList out = {});

// The stack [G, .., ..] if the matrices are its members: views of one tensor at equal distances.
std::optional<at::Tensor> as_stack(at::TensorList matrices);
std::optional<at::Tensor> as_contiguous_stack(at::TensorList matrices);

// The problem with its list, if it has one, as a stack: the scales copied into one tensor, and the matrices
// too if `copy_data` and they are no stack.
GemmProblem with_stacked_list(const GemmProblem& problem, bool copy_data);

// Without a kernel for the formats: dequantizes the operands, or applies the scales of rows to the sums.
at::Tensor run_gemm_in_steps(const GemmProblem& problem, at::ScalarType dtype, at::TensorList out);

}  // namespace transformer_plugin::gemm
