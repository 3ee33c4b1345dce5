// Argument checks that the gemm ops share.
#pragma once

#include <initializer_list>
#include <optional>

#include "common/buffers.h"
#include "common/check.h"
#include "gemm/args/launch_options.h"

namespace transformer_plugin::gemm {

inline constexpr std::initializer_list<at::ScalarType> kGemmTypes = {at::kFloat, at::kBFloat16, at::kHalf,
                                                                     at::kDouble};

// The output's dtype: `dtype`, or that of the operands. float64 combines with float64 only.
at::ScalarType output_dtype(const Argument& operand, std::optional<at::ScalarType> dtype);
// A dtype argument for the output: float32, bfloat16 or float16.
void check_rounded_dtype(const char* op, at::ScalarType dtype);
// A float matrix (dim 2) or stack of matrices (dim 3) of a dtype that GEMMs on its device support.
void check_operand(const Argument& operand, int64_t dim);
// The same for grouped GEMMs, which do not support float64 on CUDA.
void check_grouped_operand(const Argument& operand, int64_t dim);
// Group sizes on the device of `rows`, one for each matrix of `matrices` [G, .., ..].
void check_groups(const Argument& group_sizes, const Argument& rows, const Argument& matrices);
void check_groups(const Argument& group_sizes, const Argument& rows, const char* matrices,
                  const c10::SymInt& groups);
// The matrices of a grouped op: one tensor, the stack [G, .., ..], or a matrix for each group.
bool is_stack(at::TensorList matrices);
c10::SymInt group_count(at::TensorList matrices);
// Same dtype, device and sizes.
bool is_alike(const at::Tensor& x, const at::Tensor& y);
// The second operand: of the dtype and device of the first.
void check_pair(const Argument& second, const Argument& first, int64_t dim);
// Any float dtype; [N], or [G, N] with `groups`.
void check_bias(const Argument& bias, const Argument& operand, const std::optional<c10::SymInt>& groups,
                const c10::SymInt& columns);
// float32 [T], only together with a bias.
void check_bias_scale(const Argument& bias_scale, bool has_bias, const Argument& operand);
// alpha or beta: float32, one for each of the `groups` (1 of a dense product). They have no gradient.
void check_factor(const Argument& factor, const Argument& operand, const c10::SymInt& groups);
inline constexpr const char* kConstantFactor = "It is a constant: detach it, or multiply the result";
// beta excludes the flag `accumulate`, which means a beta of 1.
void check_beta(const Argument& beta, const Argument& operand, const at::Tensor& group_sizes,
                bool accumulate);
void check_launch_options(const char* op, const LaunchOptions& options);
// A buffer for weight gradients: float32 or bfloat16 [G, N, K], inner stride 1, rows that do not overlap.
void check_accumulator(const Argument& out, const Argument& operand, c10::SymIntArrayRef sizes);
// A buffer for a result: float32, bfloat16 or float16 (float64 with float64 operands) [rows, columns], with such rows.
void check_result(const Argument& out, const Argument& operand, const c10::SymInt& rows,
                  const c10::SymInt& columns);
// check_apart and check_no_gradient of the entries of a list that is read; of a single entry, `name` without an index.
void check_apart_from_list(const char* op, const at::Tensor& out, const char* name, at::TensorList read);
void check_no_gradients(const char* op, const char* name, at::TensorList list, const char* advice);
// Matrices of groups as a list: 1 to kMaxPointers, all of the sizes, the dtype and the device of the first.
void check_list(const char* op, const char* name, at::TensorList list);
// A list of buffers for weight gradients: float32 or bfloat16 [N, K] each, rows as in check_accumulator, all of one row stride.
void check_accumulators(const char* op, const char* name, at::TensorList out, const Argument& operand,
                        c10::SymIntArrayRef sizes);

}  // namespace transformer_plugin::gemm
