// Dequantization for ops that multiply quantized operands. Operands are checked.
#pragma once

#include "quantize/ops/matrix_shape.h"

namespace transformer_plugin::quantize {

// For NVFP4: elements times the scales of their blocks, which is exact in bfloat16, without the global
// factor. The tail of a ragged matrix is not written. On a CPU or a GPU.
at::Tensor dequantize_without_amax(const at::Tensor& data, const at::Tensor& scale_inv,
                                   const at::Tensor* group_sizes, const Format& format, at::ScalarType dtype,
                                   bool transposed);
// The values of one matrix of a stack, into `values` [rows, columns], contiguous. On a CPU; callable from any
// thread.
void dequantize_matrix(const at::Tensor& data, const at::Tensor& scale_inv, const OptionalTensor& amax,
                       const Format& format, int64_t matrix, const at::Tensor& values);

}  // namespace transformer_plugin::quantize
