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

// For bfloat16 oneDNN compiles a kernel for every size that it has not met, which takes longer than the product of a
// few hundred rows, and groups have other sizes in every step. So they are multiplied in sizes that come back:
// multiples of this many rows.
constexpr int64_t kRowStep = 64;

bool compiles_for_each_size(const Tensor& operand, int64_t rows) {
  return operand.scalar_type() == at::kBFloat16 && rows > kRowStep && rows % kRowStep != 0;
}

int64_t up_to_whole_steps(int64_t rows) { return (rows + kRowStep - 1) / kRowStep * kRowStep; }

// Calls multiply(first row, rows) until the group's rows, `rows` from `begin` on, are done. Some may come twice, and
// some that follow the group may come too: whoever follows writes over them.
template <typename Multiply>
void multiply_in_steps(const Tensor& a, int64_t begin, int64_t rows, Multiply&& multiply) {
  if (!compiles_for_each_size(a, rows)) return multiply(begin, rows);
  const int64_t more = up_to_whole_steps(rows);
  if (begin + more <= a.size(0)) return multiply(begin, more);
  multiply(begin, more - kRowStep);
  multiply(begin + rows - kRowStep, kRowStep);
}

// The group's rows, with zeros below up to whole steps.
Tensor in_whole_steps(const Tensor& matrix, int64_t begin, int64_t rows) {
  const Tensor group = matrix.narrow(0, begin, rows);
  if (!compiles_for_each_size(matrix, rows)) return group;
  const Tensor padded = empty(matrix, {up_to_whole_steps(rows), matrix.size(1)}, matrix.scalar_type());
  padded.narrow(0, 0, rows).copy_(group);
  padded.narrow(0, rows, padded.size(0) - rows).zero_();
  return padded;
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

void row_product_cpu(const RowProduct& product, const Tensor& out) {
  const Tensor a = readable_rows(product.a);
  const Tensor b = product.transpose_b ? product.b.transpose(1, 2) : product.b;
  const at::ScalarType wide = sum_dtype(a.scalar_type()), dtype = out.scalar_type();
  // torch's product rounds its FP32 sum once, after a bias of its own dtype.
  const bool same_dtype = dtype == a.scalar_type();
  const bool fused_bias = product.bias && !product.bias_scale && product.bias->scalar_type() == dtype;
  const int32_t* offsets = product.offsets.const_data_ptr<int32_t>();
  const int64_t groups = product.b.size(0);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = offsets[g], rows = offsets[g + 1] - begin;
    if (rows == 0) continue;
    Tensor out_g = out.narrow(0, begin, rows);
    const Tensor a_g = a.narrow(0, begin, rows), b_g = b.select(0, g);
    const bool direct = same_dtype && !product.alpha && !faster_in_float32(a_g, b_g);
    if (direct && (fused_bias || !product.bias || dtype == wide)) {
      multiply_in_steps(a, begin, rows, [&](int64_t first, int64_t count) {
        Tensor target = out.narrow(0, first, count);
        const Tensor part = a.narrow(0, first, count);
        fused_bias ? at::addmm_out(target, product.bias->select(0, g), part, b_g)
                   : at::mm_out(target, part, b_g);
      });
    }
    const bool done = direct && (fused_bias || !product.bias);
    if (done) continue;
    Tensor sum = direct && dtype == wide ? out_g : at::mm(a_g.to(wide), b_g.to(wide));
    if (product.alpha) sum.mul_(product.alpha->select(0, g));
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
}

void reduction_product_cpu(const ReductionProduct& product, const Tensor& out, bool accumulate) {
  const Tensor grad = readable_rows(product.grad), input = readable_rows(product.input);
  const at::ScalarType wide = sum_dtype(grad.scalar_type());
  const int32_t* offsets = product.offsets.const_data_ptr<int32_t>();
  const bool is_plain = !product.alpha && !product.beta;
  for (int64_t g = 0; g < product.groups(); ++g) {
    const int64_t begin = offsets[g], rows = offsets[g + 1] - begin;
    Tensor out_g = out.select(0, g);
    if (rows == 0 && !product.beta) {
      if (!accumulate) out_g.zero_();
      continue;
    }
    const Tensor grad_g = grad.narrow(0, begin, rows).t(), input_g = input.narrow(0, begin, rows);
    if (is_plain && out.scalar_type() == grad.scalar_type() && !faster_in_float32(grad_g, input_g)) {
      multiply_into(out_g, in_whole_steps(grad, begin, rows).t(), in_whole_steps(input, begin, rows),
                    accumulate);
    } else if (is_plain && out.scalar_type() == wide) {
      multiply_into(out_g, grad_g.to(wide), input_g.to(wide), accumulate);
    } else {
      Tensor sum = at::mm(grad_g.to(wide), input_g.to(wide));
      if (product.alpha) sum.mul_(product.alpha->select(0, g));
      const float beta = product.beta ? product.beta->select(0, g).item<float>() : accumulate;
      if (beta != 0) sum.add_(out_g.to(wide), beta);
      out_g.copy_(sum);
    }
  }
}

}  // namespace transformer_plugin::gemm
