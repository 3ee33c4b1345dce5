#include "gemm/grouped_product.h"

#include "common/tensor.h"

namespace transformer_plugin::gemm {
namespace {

at::Tensor empty_gradient(const ReductionProduct& product, at::ScalarType dtype) {
  return empty(product.grad, {product.groups(), product.grad.size(1), product.input.size(1)}, dtype);
}

}  // namespace

at::Tensor row_product(const RowProduct& product, at::ScalarType dtype) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (product.a.is_cuda()) return row_product_cuda(product, dtype);
#endif
  return row_product_cpu(product, dtype);
}

at::Tensor reduction_product(const ReductionProduct& product, at::ScalarType dtype) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (product.grad.is_cuda()) return reduction_product_cuda(product, dtype);
#endif
  const at::Tensor out = empty_gradient(product, dtype);
  reduction_product_cpu(product, out, false);
  return out;
}

void reduction_product_out(const ReductionProduct& product, const at::Tensor& out, bool accumulate) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (product.grad.is_cuda()) return reduction_product_out_cuda(product, out, accumulate);
#endif
  reduction_product_cpu(product, out, accumulate);
}

}  // namespace transformer_plugin::gemm
