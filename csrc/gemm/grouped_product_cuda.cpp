// On CUDA: our own kernels, and on Blackwell torch's grouped product where it fits. Nothing is read on the host.
#ifdef TRANSFORMER_PLUGIN_CUDA

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/_grouped_mm.h>

#include "common/tensor.h"
#include "gemm/grouped_arguments.h"
#include "gemm/grouped_product.h"
#include "gemm/hopper.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;

// torch._grouped_mm without a host read: bf16, rows of whole 16 bytes, below 1024 groups, Hopper or Blackwell; the first
// has faster kernels here. Elsewhere it falls back to a loop that reads the offsets, so it is not called.
bool torch_takes(const Tensor& a, const Tensor& b, int64_t groups, at::ScalarType dtype) {
  const int major = at::cuda::getDeviceProperties(a.device().index())->major;
  return a.scalar_type() == at::kBFloat16 && dtype == at::kBFloat16 && groups > 0 && groups < 1024 &&
         a.numel() > 0 && b.numel() > 0 && aligned_rows(a) && aligned_rows(b) &&
         (major == 10 || (major == 9 && !kBuiltForHopper));
}

void run_rows(const RowProduct& product, const Tensor& a, const Tensor& b, const Tensor& out, void* stream) {
  const auto bias = as_float(product.bias), bias_scale = as_float(product.bias_scale);
  const auto alpha = as_float(product.alpha), beta = as_float(product.beta);
  GroupedKernelArgs args{};
  args.a = a.const_data_ptr();
  args.b = b.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.offsets = product.offsets.const_data_ptr<int32_t>();
  args.alpha = float_or_null(alpha);
  args.beta = float_or_null(beta);
  args.bias = float_or_null(bias);
  args.bias_scale = float_or_null(bias_scale);
  args.rows = a.size(0);
  args.groups = b.size(0);
  args.n = product.columns();
  args.k = a.size(1);
  args.out_row_stride = row_stride(out);
  args.dtype = to_dtype(a.scalar_type());
  args.out_dtype = to_dtype(out.scalar_type());
  args.vectors = aligned_rows(a) && aligned_rows(b);
  args.options = product.options;
  launch_grouped_kernel(product.transpose_b ? GroupedMode::kForward : GroupedMode::kDataGrad, args, stream);
}

}  // namespace

Tensor row_product_cuda(const RowProduct& product, at::ScalarType dtype) {
  const CudaScope scope(product.a);
  const Tensor a = product.a.contiguous(), b = product.b.contiguous();
  const int64_t groups = b.size(0);
  Tensor out;
  if (!product.bias && !product.alpha && torch_takes(a, b, groups, dtype)) {
    out =
        at::_grouped_mm(a, product.transpose_b ? b.transpose(1, 2) : b, product.offsets.narrow(0, 1, groups));
  } else {
    out = empty(a, {a.size(0), product.columns()}, dtype);
    run_rows(product, a, b, out, scope.stream());
  }
  zero_tail(out, product.offsets, scope.stream());
  return out;
}

void row_product_out_cuda(const RowProduct& product, const Tensor& out) {
  const CudaScope scope(product.a);
  run_rows(product, product.a.contiguous(), product.b.contiguous(), out, scope.stream());
  if (!product.beta) zero_tail(out, product.offsets, scope.stream());
}

Tensor reduction_product_cuda(const ReductionProduct& product, at::ScalarType dtype) {
  const CudaScope scope(product.grad);
  const Tensor grad = product.grad.contiguous(), input = product.input.contiguous();
  if (!product.alpha && torch_takes(grad, input, product.groups(), dtype)) {
    return at::_grouped_mm(grad.t(), input, product.offsets.narrow(0, 1, product.groups()));
  }
  const Tensor out = empty(grad, {product.groups(), grad.size(1), input.size(1)}, dtype);
  reduction_product_out_cuda(
      {grad, input, product.offsets, product.alpha, std::nullopt, std::nullopt, product.options}, out, false);
  return out;
}

void reduction_product_out_cuda(const ReductionProduct& product, const Tensor& out, bool accumulate) {
  const CudaScope scope(product.grad);
  const Tensor grad = product.grad.contiguous(), input = product.input.contiguous();
  const auto alpha = as_float(product.alpha), beta = as_float(product.beta);
  GroupedKernelArgs args{};
  args.a = grad.const_data_ptr();
  args.b = input.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.offsets = product.offsets.const_data_ptr<int32_t>();
  args.alpha = float_or_null(alpha);
  args.beta = float_or_null(beta);
  args.rows = grad.size(0);
  args.groups = product.groups();
  args.m = grad.size(1);
  args.n = input.size(1);
  args.out_group_stride = out.stride(0);
  args.out_row_stride = out.stride(1);
  args.dtype = to_dtype(grad.scalar_type());
  args.out_dtype = to_dtype(out.scalar_type());
  args.accumulate = accumulate;
  args.vectors = aligned_rows(grad) && aligned_rows(input);
  args.options = product.options;
  launch_grouped_kernel(GroupedMode::kWeightGrad, args, scope.stream());
}

}  // namespace transformer_plugin::gemm

#endif
