// gemm and gemm_out of quantized operands.
#pragma once

#include "gemm/dispatch/quantized_operands.h"

namespace transformer_plugin::gemm {

// The arguments of a call.
struct QuantizedCall {
  const char* op;
  OperandArguments a, b;
  const std::optional<at::Tensor>&bias, &alpha;
  bool transpose_b;
};

at::Tensor quantized_product_meta(const QuantizedCall& call, std::optional<at::ScalarType> dtype);
at::Tensor quantized_product(const QuantizedCall& call, std::optional<at::ScalarType> dtype);
void quantized_product_out_meta(const QuantizedCall& call, const std::optional<at::Tensor>& beta,
                                const at::Tensor& out);
// `accumulate`: added to what `out` holds, without a beta.
void quantized_product_out(const QuantizedCall& call, const std::optional<at::Tensor>& beta,
                           const at::Tensor& out, bool accumulate);

}  // namespace transformer_plugin::gemm
