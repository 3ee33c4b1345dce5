// Quantized operands of ops: checks, and dequantization for GEMMs that have no kernel for the formats.
#pragma once

#include <optional>
#include <string_view>

#include "common/check.h"
#include "common/quantized.h"
#include "gemm/args/gemm_problem.h"

namespace transformer_plugin::gemm {

// For tensors that require a gradient, which a product of quantized operands does not have.
inline constexpr const char* kNoQuantizedGradient =
    "A product of quantized operands has none: call linear or grouped_linear, or detach it";

// The names of an operand's arguments, for errors.
struct OperandNames {
  const char *op, *data, *scales, *scale, *amax, *format;
};

constexpr OperandNames names_of_a(const char* op) {
  return {op, "a", "a_scale", "a_scale[0]", "a_scale[1]", "a_format"};
}
constexpr OperandNames names_of_b(const char* op) {
  return {op, "b", "b_scale", "b_scale[0]", "b_scale[1]", "b_format"};
}
constexpr OperandNames names_of_grad(const char* op) {
  return {op, "grad", "grad_scale", "grad_scale[0]", "grad_scale[1]", "grad_format"};
}
constexpr OperandNames names_of_input(const char* op) {
  return {op, "input", "input_scale", "input_scale[0]", "input_scale[1]", "input_format"};
}

// An operand's data and, if it is quantized, [scale_inv] or [scale_inv, amax] and its format key.
struct OperandArguments {
  const at::Tensor& data;
  OptionalList scales;
  std::string_view key;
};

inline bool is_quantized(std::string_view a_key, std::string_view b_key) {
  return a_key != "none" || b_key != "none";
}
// Operands of format 'none' have no scales.
void check_plain(const char* op, OptionalList a_scale, OptionalList b_scale, const char* a_name = "a_scale",
                 const char* b_name = "b_scale");

// Parses the format, and checks that it has scales and that they are given; square blocks only if
// `allow_square`.
Quantized parsed_operand(const OperandNames& names, const OperandArguments& operand, bool allow_square,
                         bool transposed);
// The same with dtypes, sizes and devices checked. `group_sizes`: of ragged rows, or of columns if
// `transposed`; else null.
Quantized checked_operand(const OperandNames& names, const OperandArguments& operand, int64_t dim,
                          const at::Tensor* group_sizes, bool transposed);
// The format of an operand, which must have scales, and how many tensors its scales are, in all: `matrices`,
// and as many amaxes.
Format checked_format(const OperandNames& names, std::string_view key, at::TensorList scales, size_t matrices,
                      bool allow_square);
// Of an operand whose format is parsed.
void check_quantized(const OperandNames& names, const Quantized& operand, int64_t dim,
                     const at::Tensor* group_sizes);
// The first matrix of a list, after all were checked; `scales` are those of the matrices, then their amaxes.
Quantized checked_list(const OperandNames& names, at::TensorList list, at::TensorList scales,
                       std::string_view key);
// Formats that multiply: operands with a scale for each row go together, `b` with E4M3 elements and transposed.
void check_formats(const OperandNames& a_names, const Quantized& a, const OperandNames& b_names,
                   const Quantized& b, bool transpose_b);
// The same of a weight gradient, whose operands are quantized along the columns of each group.
void check_wgrad_formats(const OperandNames& grad_names, const Quantized& grad,
                         const OperandNames& input_names, const Quantized& input);

// Both operands of a weight gradient, checked.
struct WgradOperands {
  Quantized grad, input;
};
WgradOperands checked_wgrad_operands(const char* op, const OperandArguments& grad,
                                     const OperandArguments& input, const at::Tensor& group_sizes);

// Checks that the size of dimension `dim` of the data, in elements, equals `expected`, which the error calls
// `meaning`.
void check_value_size(const OperandNames& names, const Quantized& operand, int64_t dim,
                      const c10::SymInt& expected, const char* meaning);

// The dtype of the output: bfloat16 by default.
at::ScalarType quantized_output_dtype(const char* op, std::optional<at::ScalarType> dtype);

// alpha times, for NVFP4, the scales that both amaxes mean: the factor that a kernel applies to its sums.
std::optional<at::Tensor> alpha_and_amaxes(const GemmProblem& problem);

// `beta`, or the 1 of `accumulate` for kernels that know no such flag.
std::optional<at::Tensor> beta_or_one(const GemmProblem& problem, const at::Tensor& like);

// The problem of the dequantized operands, rows first, in a dtype in which both are exact: bfloat16 if their
// scales are powers of two (except values below 2^-133) or, on CUDA, if the remaining scale, that of a tensor
// or the amax of NVFP4, is applied to the sum, as part of alpha; else float32. Without `both`, `b` stays as
// it is.
GemmProblem dequantized(const GemmProblem& problem, bool both);

}  // namespace transformer_plugin::gemm
