// Quantized operands of ops: checks, and dequantization for GEMMs that have no kernel for the formats.
#pragma once

#include <utility>

#include "common/check.h"
#include "common/format.h"
#include "gemm/dispatch/grouped_gemm.h"

namespace transformer_plugin::gemm {

// A quantized operand of an op, with the names of its arguments for errors.
struct QuantizedArgument {
  const char* op;
  const char* name;
  const char* scale_name;
  const char* amax_name;
  const char* format_name;
  const at::Tensor& data;
  const at::Tensor& scale;
  const std::optional<at::Tensor>& amax;  // NVFP4 only
  std::string_view key;
};

// Checks format, dtypes, sizes and devices. `group_sizes`: of ragged rows, or of columns if `transposed`; else null.
Format check_quantized(const QuantizedArgument& argument, int64_t dim, const at::Tensor* group_sizes,
                       bool transposed);

// The size in elements of a dimension; packed formats store several elements in one.
c10::SymInt value_size(const QuantizedArgument& argument, const Format& format, int64_t dim);
// Checks that it equals `expected`, which the error calls `meaning`.
void check_value_size(const QuantizedArgument& argument, const Format& format, int64_t dim,
                      const c10::SymInt& expected, const char* meaning);

// A dequantized operand, and the scales that are applied to the sum instead of to the elements.
struct Values {
  at::Tensor data;
  std::optional<at::Tensor> factor;  // float32, one for each group or matrix
};

// The dtype in which both dequantized operands are exact: bfloat16 if their scales are powers of two (except values below 2^-133)
// or, on CUDA, if the remaining scale, that of a tensor or the amax of NVFP4, is applied to the sum; else float32.
at::ScalarType dequantized_dtype(const QuantizedArgument& a, const Format& a_format,
                                 const QuantizedArgument& b, const Format& b_format);

// alpha times, for NVFP4, the scales that both amaxes mean: the factor that a kernel applies to its sums.
std::optional<at::Tensor> alpha_and_amaxes(const std::optional<at::Tensor>& alpha, const QuantizedArgument& a,
                                           const Format& a_format, const QuantizedArgument& b,
                                           const Format& b_format);

// In the layout of the original matrix: rows first, also if the operand is `transposed`.
Values dequantized_operand(const QuantizedArgument& argument, const Format& format,
                           const at::Tensor* group_sizes, bool transposed, at::ScalarType dtype);

// For a CPU: dequantizes one matrix of a stack at a time. The argument must outlive the result.
QuantizedStack quantized_stack(const QuantizedArgument& argument, const Format& format, at::ScalarType dtype);

// The product of the factors of two operands, if any.
std::optional<at::Tensor> combined_factor(const Values& a, const Values& b);
// alpha times the factors, if any.
std::optional<at::Tensor> scaled_by(const std::optional<at::Tensor>& alpha,
                                    const std::optional<at::Tensor>& factor);

}  // namespace transformer_plugin::gemm
