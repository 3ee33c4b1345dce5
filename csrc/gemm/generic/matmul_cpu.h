// Products of matrices on a CPU. Every op calls torch's kernels through here, so that a product has the same bits whichever op
// computes it: they depend on the values and sizes of the operands and on whether they lie by rows or by columns, and neither on
// their addresses nor on the distance of their lines.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace transformer_plugin::gemm {

// Whether matrices of this dtype are multiplied in float32 and rounded once: 16-bit ones on a CPU for which oneDNN has no
// instructions. torch's own loops are slower there, and the order of their sums depends on strides.
bool multiplies_in_float32(at::ScalarType dtype);

// a [M, K] @ b [K, N], plus a row [N] if there is one, all of one dtype. 16-bit sums are rounded after the row was added; the
// row is added to a rounded sum of a wider dtype.
at::Tensor matmul_cpu(const at::Tensor& a, const at::Tensor& b,
                      const std::optional<at::Tensor>& row = std::nullopt);

// a @ b, of 16-bit matrices in float32. Slices of their rows and columns have the bits of the whole product.
at::Tensor wide_matmul_cpu(const at::Tensor& a, const at::Tensor& b);

// Whether wide_matmul_cpu has a matrix of this size in place of a larger one with zeros.
bool has_whole_tiles(int64_t rows, int64_t columns);

// out = a @ b, or plus + a @ b, where `plus` is a row or `out` itself, with the same roundings.
void matmul_cpu_out(const at::Tensor& out, const std::optional<at::Tensor>& plus, const at::Tensor& a,
                    const at::Tensor& b);

}  // namespace transformer_plugin::gemm
