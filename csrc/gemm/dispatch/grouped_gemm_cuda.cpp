// On CUDA: our own kernels, and on Blackwell torch's grouped product where it fits. Nothing is read on the host.
#ifdef TRANSFORMER_PLUGIN_CUDA

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/_grouped_mm.h>

#include <algorithm>
#include <vector>

#include "common/row_index.h"
#include "common/tensor.h"
#include "gemm/dispatch/grouped_gemm.h"
#include "gemm/dispatch/grouped_gemm_args.h"
#include "gemm/sm90/gather/gather.h"

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

// The stack alone, or the matrices of the list, as kernels read them.
std::vector<Tensor> operands_of(const RowProduct& product) {
  std::vector<Tensor> held;
  held.reserve(std::max<size_t>(product.list.size(), 1));
  if (product.list.empty()) held.push_back(product.b.contiguous());
  for (const Tensor& matrix : product.list) held.push_back(matrix.contiguous());
  return held;
}

// The left operand without an index.
Tensor left_operand(const RowProduct& product) {
  return product.rows ? take_rows(product.a, *product.rows, product.offsets) : product.a.contiguous();
}

// Through the index by the kernel itself where it can; `args` but for the left operand.
bool launch_through_index(const RowProduct& product, GroupedMode mode, const GroupedKernelArgs& args,
                          void* stream) {
  if (!product.rows || product.a.stride(1) != 1) return false;
  const TakenRows rows = rows_by_index(product.a, *product.rows, product.offsets);
  if (!hopper_gathers(mode, args, rows)) return false;
  launch_hopper_gather(mode, args, rows, stream);
  return true;
}

void run_rows(const RowProduct& product, at::TensorList operands, const Tensor& out, void* stream) {
  const DeviceList list(product.list.empty() ? at::TensorList() : operands, product.a);
  const auto bias = as_float(product.bias), bias_scale = as_float(product.bias_scale);
  const auto alpha = as_float(product.alpha), beta = as_float(product.beta);
  GroupedKernelArgs args{};
  args.b = operands[0].const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.offsets = product.offsets.const_data_ptr<int32_t>();
  args.alpha = float_or_null(alpha);
  args.beta = float_or_null(beta);
  args.list = list.get();
  args.bias = float_or_null(bias);
  args.bias_scale = float_or_null(bias_scale);
  args.rows = product.capacity();
  args.groups = product.groups();
  args.n = product.columns();
  args.k = product.a.size(1);
  args.out_row_stride = row_stride(out);
  args.dtype = to_dtype(product.a.scalar_type());
  args.out_dtype = to_dtype(out.scalar_type());
  args.vectors = std::all_of(operands.begin(), operands.end(), aligned_rows);
  args.zeroes_tail = !product.beta;
  args.options = product.options;
  const GroupedMode mode = product.transpose_b ? GroupedMode::kForward : GroupedMode::kDataGrad;
  if (launch_through_index(product, mode, args, stream)) return;
  const Tensor a = left_operand(product);
  args.a = a.const_data_ptr();
  args.vectors = args.vectors && aligned_rows(a);
  launch_grouped_kernel(mode, args, stream);
}

// Into the stack `out`, or into the matrices of a list, of which `out` then is the first.
void run_reduction(const ReductionProduct& product, const Tensor& out, const MatrixList& list,
                   bool accumulate, void* stream) {
  const Tensor grad = product.grad.contiguous(), input = product.input.contiguous();
  const auto alpha = as_float(product.alpha), beta = as_float(product.beta);
  GroupedKernelArgs args{};
  args.a = grad.const_data_ptr();
  args.b = input.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.offsets = product.offsets.const_data_ptr<int32_t>();
  args.alpha = float_or_null(alpha);
  args.beta = float_or_null(beta);
  args.list = list;
  args.rows = grad.size(0);
  args.groups = product.groups();
  args.m = grad.size(1);
  args.n = input.size(1);
  args.out_row_stride = list.addresses ? row_stride(out) : out.stride(1);
  args.out_group_stride = list.addresses ? args.m * args.out_row_stride : out.stride(0);
  args.dtype = to_dtype(grad.scalar_type());
  args.out_dtype = to_dtype(out.scalar_type());
  args.accumulate = accumulate;
  args.vectors = aligned_rows(grad) && aligned_rows(input);
  args.options = product.options;
  launch_grouped_kernel(GroupedMode::kWeightGrad, args, stream);
}

}  // namespace

Tensor row_product_cuda(const RowProduct& product, at::ScalarType dtype) {
  const CudaScope scope(product.a);
  const std::vector<Tensor> operands = operands_of(product);
  const Tensor& b = operands[0];
  const int64_t groups = product.groups();
  const bool is_plain = !product.bias && !product.alpha && product.list.empty();
  if (is_plain && product.capacity() > 0 && torch_takes(product.a, b, groups, dtype)) {
    const Tensor out = at::_grouped_mm(left_operand(product), product.transpose_b ? b.transpose(1, 2) : b,
                                       product.offsets.narrow(0, 1, groups));
    zero_tail(out, product.offsets, scope.stream());
    return out;
  }
  const Tensor out = empty(product.a, {product.capacity(), product.columns()}, dtype);
  run_rows(product, operands, out, scope.stream());
  return out;
}

void row_product_out_cuda(const RowProduct& product, const Tensor& out) {
  const CudaScope scope(product.a);
  run_rows(product, operands_of(product), out, scope.stream());
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
  run_reduction(product, out, {}, accumulate, scope.stream());
}

void reduction_product_list_out_cuda(const ReductionProduct& product, at::TensorList out, bool accumulate) {
  const CudaScope scope(product.grad);
  for (const Tensor& matrix : out) matrix.mutable_data_ptr();  // of its own, where it was shared to be copied
  const DeviceList list(out, product.grad);
  run_reduction(product, out[0], list.get(), accumulate, scope.stream());
}

}  // namespace transformer_plugin::gemm

#endif
