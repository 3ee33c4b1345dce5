#ifdef TRANSFORMER_PLUGIN_CUDA

#include <ATen/cuda/CUDAContextLight.h>

#include <algorithm>
#include <vector>

#include "common/tensor.h"
#include "gemm/dispatch/cuda_args.h"
#include "gemm/dispatch/quantized_gemm.h"
#include "gemm/dispatch/select.h"
#include "gemm/sm90/align_groups.h"
#include "gemm/sm90/launch.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;

// torch cannot copy E2M1, so its bytes are copied.
Tensor contiguous_data(const Tensor& data) {
  return data.is_contiguous() ? data : data.view(at::kByte).contiguous();
}

// to_dtype does not support E2M1.
DType dtype_of(const Tensor& data) {
  const at::ScalarType dtype = data.scalar_type();
  return dtype == at::kFloat4_e2m1fn_x2 ? DType::kFloat4E2M1 : to_dtype(dtype);
}

struct Contiguous {
  Tensor data, scale;
  DType dtype;
  bool tiled;
  explicit Contiguous(const Quantized& operand)
      : data(contiguous_data(operand.data)),
        scale(operand.scale.contiguous()),
        dtype(dtype_of(operand.data)),
        tiled(operand.format.tiled_scales) {}
};

GroupedGemmArgs arguments_of(const Contiguous& a, const Contiguous& b, const std::optional<Tensor>& offsets,
                             OperandScaling scales) {
  GroupedGemmArgs args{};
  args.scaling = scales;
  args.a = a.data.const_data_ptr();
  args.b = b.data.const_data_ptr();
  args.a_scale = a.scale.const_data_ptr();
  args.b_scale = b.scale.const_data_ptr();
  args.offsets = offsets ? offsets->const_data_ptr<int32_t>() : nullptr;
  args.groups = offsets ? offsets->size(0) - 1 : 1;
  args.dtype = a.dtype;
  args.b_dtype = b.dtype;
  args.a_tiled = a.tiled;
  args.b_tiled = b.tiled;
  args.rows_16_byte_aligned = aligned_rows(a.data) && aligned_rows(b.data);
  return args;
}

// An empty tensor for the data with aligned groups.
Tensor aligned_copy(const Tensor& lines, int64_t groups) {
  return empty(lines, {lines.size(0), quantize::aligned_length(lines.size(1), groups)}, lines.scalar_type());
}

OperandCopy operand_copy(const Tensor& from, const Tensor& to) {
  return {static_cast<const uint8_t*>(from.const_data_ptr()), static_cast<uint8_t*>(to.mutable_data_ptr()),
          from.size(0)};
}

}  // namespace

bool has_quantized_kernels_cuda(const Tensor& like) {
  return kBuiltForSm90a && at::cuda::getDeviceProperties(like.device().index())->major == 9;
}

bool quantized_gemm_out_cuda(const QuantizedGemm& product, const Tensor& out) {
  const CudaScope scope(product.a.data);
  const bool microscaled = product.scales == OperandScaling::kMx || product.scales == OperandScaling::kNv;
  if (microscaled && !product.list.empty()) return false;
  const Contiguous a(product.a), b(product.b);
  std::vector<Tensor> matrices;  // of the list; must live until the kernels are launched
  matrices.reserve(product.list.size());
  for (const Tensor& matrix : product.list) matrices.push_back(contiguous_data(matrix));
  const DevicePointerArray list(matrices, a.data);
  const auto bias = as_float(product.bias), bias_scale = as_float(product.bias_scale);
  const auto alpha = as_float(product.alpha), beta = as_float(product.beta);
  GroupedGemmArgs args = arguments_of(a, b, product.offsets, product.scales);
  args.rows_16_byte_aligned =
      args.rows_16_byte_aligned && std::all_of(matrices.begin(), matrices.end(), aligned_rows);
  args.list = list.get();
  args.options = product.options;
  args.out = out.mutable_data_ptr();
  args.alpha = float_or_null(alpha);
  args.beta = float_or_null(beta);
  args.zero_tail = product.zero_tail && product.offsets.has_value() && !product.beta;
  args.bias = float_or_null(bias);
  args.bias_scale = float_or_null(bias_scale);
  args.rows = a.data.size(0);
  args.n = b.data.size(-2);
  args.k = a.data.size(1) * (args.dtype == DType::kFloat4E2M1 ? 2 : 1);
  args.out_row_stride = row_stride(out);
  args.out_dtype = to_dtype(out.scalar_type());
  const Selection selection =
      select_gemm({GemmDirection::kFprop, args, pointers_aligned(args)}, current_gpu());
  if (selection.backend != Backend::kSm90) return false;
  Tensor values;  // must live until the kernels are launched
  if (args.scaling == OperandScaling::kMx || args.scaling == OperandScaling::kNv) {
    const int64_t columns = dequantized_columns(args.k), bytes = args.rows * columns * 2;
    values = empty(out, {bytes + ready_counters(args.rows) * 4}, at::kByte);
    args.a_dequantized = values.mutable_data_ptr();
    args.a_ready_rows = static_cast<uint8_t*>(args.a_dequantized) + bytes;
  }
  const Launcher launch = sm90_launcher(GemmDirection::kFprop, args);
  launch(args, selection.config, scope.stream());
  return true;
}

bool quantized_wgrad_out_cuda(const QuantizedWgrad& reduction, at::TensorList buffers, bool accumulate) {
  const CudaScope scope(reduction.grad.data);
  const Contiguous grad(reduction.grad), input(reduction.input);
  const Tensor& out = buffers[0];
  const bool is_list = reduction.offsets && out.dim() == 2;
  for (const Tensor& buffer : buffers) buffer.mutable_data_ptr();  // makes copy-on-write tensors writable
  const DevicePointerArray list(is_list ? buffers : at::TensorList(), grad.data);
  const auto alpha = as_float(reduction.alpha), beta = as_float(reduction.beta);
  GroupedGemmArgs args = arguments_of(grad, input, reduction.offsets, reduction.scales);
  args.list = list.get();
  args.options = reduction.options;
  args.alpha = float_or_null(alpha);
  args.beta = float_or_null(beta);
  args.out = out.mutable_data_ptr();
  args.rows = grad.data.size(1) - (reduction.aligned() ? quantize::aligned_length(0, args.groups) : 0);
  args.m = grad.data.size(0);
  args.n = input.data.size(0);
  args.out_row_stride = out.dim() == 3 ? out.stride(1) : row_stride(out);
  args.out_group_stride = out.dim() == 3 ? out.stride(0) : args.m * args.out_row_stride;
  args.out_dtype = to_dtype(out.scalar_type());
  args.accumulate = accumulate;
  if (reduction.aligned() && !args.rows_16_byte_aligned) return false;
  args.read_all_group_aligned = reduction.aligned() || !args.rows_16_byte_aligned;
  args.rows_16_byte_aligned = true;  // the kernel reads aligned copies
  const Selection selection =
      select_gemm({GemmDirection::kWgrad, args, pointers_aligned(args)}, current_gpu());
  if (selection.backend != Backend::kSm90) return false;
  Tensor grad_aligned, input_aligned;  // must live until the kernels are launched
  if (reduction.aligned()) {
    args.a_group_aligned = args.a;
    args.b_group_aligned = args.b;
  } else if (reduction.offsets || args.read_all_group_aligned) {
    grad_aligned = aligned_copy(grad.data, args.groups);
    input_aligned = aligned_copy(input.data, args.groups);
    args.a_group_aligned = grad_aligned.const_data_ptr();
    args.b_group_aligned = input_aligned.const_data_ptr();
    launch_align_groups(operand_copy(grad.data, grad_aligned), operand_copy(input.data, input_aligned),
                        args.offsets, args.groups, args.rows, args.read_all_group_aligned, scope.stream());
  }
  const Launcher launch = sm90_launcher(GemmDirection::kWgrad, args);
  launch(args, selection.config, scope.stream());
  return true;
}

}  // namespace transformer_plugin::gemm

#endif
