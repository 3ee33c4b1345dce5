// Products of matrices on a CPU. Every op calls torch's kernels through here, so that a product has the same bits whichever op
// computes it: they depend on the values, sizes and strides of the operands, and not on their addresses.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace transformer_plugin::gemm {

// Whether matrices of this dtype are multiplied in float32 and rounded once: 16-bit ones on a CPU for which oneDNN has no
// instructions. torch's own loops are slower there, and the order of their sums depends on strides.
bool multiplies_in_float32(at::ScalarType dtype);

// a [M, K] @ b [K, N], plus a row [N] if there is one, all of one dtype.
at::Tensor matmul_cpu(const at::Tensor& a, const at::Tensor& b,
                      const std::optional<at::Tensor>& row = std::nullopt);

// out = a @ b, or plus + a @ b, where `plus` is a row or `out` itself.
void matmul_cpu_out(const at::Tensor& out, const std::optional<at::Tensor>& plus, const at::Tensor& a,
                    const at::Tensor& b);

}  // namespace transformer_plugin::gemm
