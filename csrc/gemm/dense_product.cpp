#include "gemm/dense_product.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

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

}  // namespace

Tensor dense_product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
                     at::ScalarType dtype, const std::optional<Tensor>& alpha) {
  // torch's kernels add a bias of the output's dtype to the FP32 sum before they round.
  if (dtype == a.scalar_type() && !alpha) {
    if (!bias) return at::mm(a, b);
    if (bias->scalar_type() == dtype) return at::addmm(*bias, a, b);
  }
  Tensor sum = wide_product(a, b);
  if (alpha) sum.mul_(*alpha);
  if (bias) sum.add_(bias->to(sum.scalar_type()));
  return sum.to(dtype);
}

}  // namespace transformer_plugin::gemm
