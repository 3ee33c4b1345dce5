// On a CPU, one product of torch's for each group.
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include "common/tensor.h"
#include "gemm/dense_product.h"
#include "gemm/grouped_product.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;

// Rows that BLAS reads where they are; a gradient of stride 0 is copied once instead of once a group.
Tensor readable_rows(const Tensor& matrix) {
  const bool dense = matrix.stride(1) == 1 && matrix.stride(0) >= matrix.size(1);
  return dense ? matrix : matrix.contiguous();
}

// out += a @ b, or out = a @ b; any strides.
void multiply_into(Tensor out, const Tensor& a, const Tensor& b, bool accumulate) {
  if (accumulate) {
    at::addmm_out(out, out, a, b);
  } else {
    at::mm_out(out, a, b);
  }
}

}  // namespace

Tensor row_product_cpu(const RowProduct& product, at::ScalarType dtype) {
  const Tensor a = readable_rows(product.a);
  const Tensor b = product.transpose_b ? product.b.transpose(1, 2) : product.b;
  const at::ScalarType wide = sum_dtype(a.scalar_type());
  // torch's product rounds its FP32 sum once, after a bias of its own dtype.
  const bool same_dtype = dtype == a.scalar_type();
  const bool fused_bias = product.bias && !product.bias_scale && product.bias->scalar_type() == dtype;
  const Tensor out = empty(a, {a.size(0), product.columns()}, dtype);
  const int32_t* offsets = product.offsets.const_data_ptr<int32_t>();
  const int64_t groups = product.b.size(0);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = offsets[g], rows = offsets[g + 1] - begin;
    if (rows == 0) continue;
    Tensor out_g = out.narrow(0, begin, rows);
    const Tensor a_g = a.narrow(0, begin, rows), b_g = b.select(0, g);
    const bool direct = same_dtype && !faster_in_float32(a_g, b_g);
    if (direct && fused_bias) {
      at::addmm_out(out_g, product.bias->select(0, g), a_g, b_g);
    } else if (direct && (!product.bias || dtype == wide)) {
      at::mm_out(out_g, a_g, b_g);
    }
    const bool done = direct && (fused_bias || !product.bias);
    if (done) continue;
    Tensor sum = direct && dtype == wide ? out_g : at::mm(a_g.to(wide), b_g.to(wide));
    if (product.bias) {
      Tensor bias = product.bias->select(0, g).to(wide).expand({rows, out.size(1)});
      if (product.bias_scale) {
        sum.addcmul_(bias, product.bias_scale->narrow(0, begin, rows).to(wide).unsqueeze(1));
      } else {
        sum.add_(bias);
      }
    }
    if (!sum.is_same(out_g)) out_g.copy_(sum);
  }
  out.narrow(0, offsets[groups], a.size(0) - offsets[groups]).zero_();
  return out;
}

void reduction_product_cpu(const ReductionProduct& product, const Tensor& out, bool accumulate) {
  const Tensor grad = readable_rows(product.grad), input = readable_rows(product.input);
  const at::ScalarType wide = sum_dtype(grad.scalar_type());
  const int32_t* offsets = product.offsets.const_data_ptr<int32_t>();
  for (int64_t g = 0; g < product.groups(); ++g) {
    const int64_t begin = offsets[g], rows = offsets[g + 1] - begin;
    Tensor out_g = out.select(0, g);
    if (rows == 0) {
      if (!accumulate) out_g.zero_();
      continue;
    }
    const Tensor grad_g = grad.narrow(0, begin, rows).t(), input_g = input.narrow(0, begin, rows);
    if (out.scalar_type() == grad.scalar_type() && !faster_in_float32(grad_g, input_g)) {
      multiply_into(out_g, grad_g, input_g, accumulate);
    } else if (out.scalar_type() == wide) {
      multiply_into(out_g, grad_g.to(wide), input_g.to(wide), accumulate);
    } else {
      Tensor sum = at::mm(grad_g.to(wide), input_g.to(wide));
      if (accumulate) sum.add_(out_g.to(wide));
      out_g.copy_(sum);
    }
  }
}

}  // namespace transformer_plugin::gemm
