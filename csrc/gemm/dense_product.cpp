#include "gemm/dense_product.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mm_cpu_dispatch.h>

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;

// The sum before it is rounded.
Tensor wide_product(const Tensor& a, const Tensor& b) {
  const at::ScalarType wide = sum_dtype(a.scalar_type());
  if (a.scalar_type() == wide) return at::mm(a, b);
  if (a.is_cuda() && a.numel() > 0 && b.numel() > 0) return at::mm(a, b, wide);
  return at::mm(a.to(wide), b.to(wide));
}

// Operands, bias and output of one dtype. torch's kernels are called outright and a float32 bias is added by a loop:
// the dispatcher and addmm's copy of the bias would cost a small product a quarter of its time.
Tensor cpu_product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias) {
  if (!bias) return at::cpu::mm(a, b);
  if (a.scalar_type() != at::kFloat || !bias->is_contiguous()) return at::cpu::addmm(*bias, a, b);
  const Tensor out = at::cpu::mm(a, b);
  add_bias_cpu(out.mutable_data_ptr<float>(), bias->const_data_ptr<float>(), out.size(0), out.size(1));
  return out;
}

}  // namespace

Tensor transposed_view(const Tensor& matrix) {
  return at::native::as_strided_tensorimpl(matrix, {matrix.size(1), matrix.size(0)},
                                           {matrix.stride(1), matrix.stride(0)});
}

Tensor dense_product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
                     at::ScalarType dtype, const std::optional<Tensor>& alpha) {
  // torch's kernels add a bias of the output's dtype to the FP32 sum before they round.
  const bool same_dtype = dtype == a.scalar_type() && (!bias || bias->scalar_type() == dtype);
  if (same_dtype && !alpha) {
    if (a.is_cpu()) return cpu_product(a, b, bias);
    return bias ? at::addmm(*bias, a, b) : at::mm(a, b);
  }
  Tensor sum = wide_product(a, b);
  if (alpha) sum.mul_(*alpha);
  if (bias) sum.add_(bias->to(sum.scalar_type()));
  return sum.to(dtype);
}

}  // namespace transformer_plugin::gemm
