// The values of quantized operands, for products that take them apart first.
#pragma once

#include <utility>

#include "common/check.h"
#include "common/format.h"
#include "gemm/dispatch/grouped_gemm.h"

namespace transformer_plugin::gemm {

// A quantized operand of an op, named for its errors: `name`, `name`_scale, `name`_amax and `format_name`.
struct QuantizedArgument {
  const char* op;
  const char* name;
  const char* scale_name;
  const char* amax_name;
  const char* format_name;
  const at::Tensor& data;
  const at::Tensor& scale;
  const std::optional<at::Tensor>& amax;  // what the matrix was scaled by, of formats that take one
  std::string_view key;
};

// Checks format, dtypes, sizes and devices. `group_sizes` is given for ragged rows (columns when `transposed`).
Format check_quantized(const QuantizedArgument& argument, int64_t dim, const at::Tensor* group_sizes,
                       bool transposed);

// The size of the values in a dimension, which for packed elements is more than that of the data.
c10::SymInt value_size(const QuantizedArgument& argument, const Format& format, int64_t dim);
// It must equal `expected`, which is `meaning` in the error.
void check_value_size(const QuantizedArgument& argument, const Format& format, int64_t dim,
                      const c10::SymInt& expected, const char* meaning);

// Values whose products are exact in FP32 sums, and the factor that is left over.
struct Values {
  at::Tensor data;
  std::optional<at::Tensor> factor;  // float32, one for each group or matrix
};

// The dtype in which the values of both operands are exact: bfloat16 when their scales are powers of two (values
// below 2^-133 aside) or, on CUDA, when scales per tensor stay outside as factors, as the amax of NVFP4 does; else
// float32.
at::ScalarType dequantized_dtype(const QuantizedArgument& a, const Format& a_format,
                                 const QuantizedArgument& b, const Format& b_format);

// A caller's factors and, of NVFP4, those of both amaxes: what products of codes and their blocks' scales are multiplied by.
std::optional<at::Tensor> alpha_and_amaxes(const std::optional<at::Tensor>& alpha, const QuantizedArgument& a,
                                           const Format& a_format, const QuantizedArgument& b,
                                           const Format& b_format);

// In the layout of the matrix before it was quantized: rows first, also of an operand that is `transposed`.
Values dequantized_operand(const QuantizedArgument& argument, const Format& format,
                           const at::Tensor* group_sizes, bool transposed, at::ScalarType dtype);

// The same of a stack on a CPU, for as long as the argument lives: with no factor left over.
Codes quantized_stack(const QuantizedArgument& argument, const Format& format, at::ScalarType dtype);

// The product of two leftover factors, if any.
std::optional<at::Tensor> combined_factor(const Values& a, const Values& b);
// The product of a caller's factors and the leftover ones, if any.
std::optional<at::Tensor> scaled_by(const std::optional<at::Tensor>& alpha,
                                    const std::optional<at::Tensor>& factor);

}  // namespace transformer_plugin::gemm
