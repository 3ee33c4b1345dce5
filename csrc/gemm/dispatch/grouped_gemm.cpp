#include "gemm/dispatch/grouped_gemm.h"

#include "common/row_index.h"
#include "common/tensor.h"
#include "gemm/generic/dense_gemm.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;

// A copy of the rows that the index names, for kernels that do not gather.
Tensor taken_rows(const Tensor& matrix, const std::optional<Tensor>& rows, const Tensor& offsets) {
  return rows ? take_rows(matrix, *rows, offsets) : matrix;
}

GroupedGemm with_rows(const GroupedGemm& product, const Tensor& a) {
  return {a,
          product.b,
          product.offsets,
          product.bias,
          product.bias_scale,
          product.transpose_b,
          product.alpha,
          product.beta,
          std::nullopt,
          product.options,
          product.quantized_b,
          product.list,
          product.zero_tail};
}

GroupedWgrad with_rows(const GroupedWgrad& product, const Tensor& grad, const Tensor& input) {
  return {grad,         input,        product.offsets, product.alpha,
          product.beta, std::nullopt, std::nullopt,    product.options};
}

// out = product + beta * out, with the product in a temporary of the dtype of sums.
void grouped_gemm_with_beta_cpu(const GroupedGemm& product, const Tensor& out) {
  const at::ScalarType wide = sum_dtype(product.a.scalar_type());
  const Tensor sums = empty(product.a, {product.a.size(0), product.columns()}, wide);
  grouped_gemm_cpu(product, sums);
  const Tensor beta = product.beta->contiguous();
  const int32_t* offsets = product.offsets.const_data_ptr<int32_t>();
  for (int64_t g = 0; g < product.groups(); ++g) {
    const int64_t begin = offsets[g], rows = offsets[g + 1] - begin;
    if (rows == 0) continue;
    const float factor = beta.const_data_ptr<float>()[g];
    Tensor sum = sums.narrow(0, begin, rows), out_g = out.narrow(0, begin, rows);
    if (factor != 0) sum.add_(out_g.to(wide), factor);
    out_g.copy_(sum);
  }
}

}  // namespace

Tensor run_grouped_gemm(const GroupedGemm& args, at::ScalarType dtype) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (args.a.is_cuda()) return grouped_gemm_cuda(args, dtype);
#endif
  const Tensor a = taken_rows(args.a, args.rows, args.offsets);
  const GroupedGemm product = with_rows(args, a);
  const Tensor out = empty(a, {a.size(0), product.columns()}, dtype);
  grouped_gemm_cpu(product, out);
  return out;
}

void run_grouped_gemm_out(const GroupedGemm& args, const Tensor& out) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (args.a.is_cuda()) {
    grouped_gemm_cuda(args, out.scalar_type(), out);
    return;
  }
#endif
  const Tensor a = taken_rows(args.a, args.rows, args.offsets);
  const GroupedGemm product = with_rows(args, a);
  product.beta ? grouped_gemm_with_beta_cpu(product, out) : grouped_gemm_cpu(product, out);
}

Tensor run_grouped_wgrad(const GroupedWgrad& args, at::ScalarType dtype) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (args.grad.is_cuda()) return grouped_wgrad_cuda(args, dtype);
#endif
  const Tensor grad = taken_rows(args.grad, args.grad_rows, args.offsets);
  const Tensor input = taken_rows(args.input, args.input_rows, args.offsets);
  const GroupedWgrad product = with_rows(args, grad, input);
  const Tensor out = empty(grad, {product.groups(), grad.size(1), input.size(1)}, dtype);
  grouped_wgrad_cpu(product, out.unbind(), false);
  return out;
}

void run_grouped_wgrad_out(const GroupedWgrad& args, at::TensorList out, bool accumulate) {
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (args.grad.is_cuda()) return grouped_wgrad_out_cuda(args, out, accumulate);
#endif
  const Tensor grad = taken_rows(args.grad, args.grad_rows, args.offsets);
  const Tensor input = taken_rows(args.input, args.input_rows, args.offsets);
  const GroupedWgrad product = with_rows(args, grad, input);
  if (out[0].dim() == 2) return grouped_wgrad_cpu(product, out, accumulate);
  grouped_wgrad_cpu(product, out[0].unbind(), accumulate);
}

std::optional<Tensor> as_stack(at::TensorList matrices) {
  const Tensor& first = matrices[0];
  if (matrices.size() == 1) return first.unsqueeze(0);
  const int64_t begin = first.storage_offset(), distance = matrices[1].storage_offset() - begin;
  if (distance <= 0) return std::nullopt;
  int64_t next = begin;
  for (const Tensor& matrix : matrices) {
    const bool follows = matrix.is_alias_of(first) && matrix.storage_offset() == next;
    if (!follows || matrix.strides() != first.strides()) return std::nullopt;
    next += distance;
  }
  const auto groups = static_cast<int64_t>(matrices.size());
  return first.as_strided({groups, first.size(0), first.size(1)},
                          {distance, first.stride(0), first.stride(1)}, begin);
}

std::optional<Tensor> as_contiguous_stack(at::TensorList matrices) {
  std::optional<Tensor> stack = as_stack(matrices);
  return stack && stack->is_contiguous() ? std::move(stack) : std::nullopt;
}

}  // namespace transformer_plugin::gemm
