#ifdef TRANSFORMER_PLUGIN_CUDA

#include <algorithm>
#include <vector>

#include "common/tensor.h"
#include "gemm/dispatch/grouped_gemm_args.h"
#include "gemm/dispatch/quantized_gemm.h"
#include "gemm/sm90/align_groups.h"
#include "gemm/sm90/launch.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;

// torch copies no E2M1.
Tensor contiguous_codes(const Tensor& codes) {
  return codes.is_contiguous() ? codes : codes.view(at::kByte).contiguous();
}

// Also of E2M1, which to_dtype does not know.
DType dtype_of(const Tensor& codes) {
  const at::ScalarType dtype = codes.scalar_type();
  return dtype == at::kFloat4_e2m1fn_x2 ? DType::kFloat4E2M1 : to_dtype(dtype);
}

struct Contiguous {
  Tensor data, scale;
  DType dtype;
  bool tiled;
  explicit Contiguous(const CodeOperand& operand)
      : data(contiguous_codes(operand.data)),
        scale(operand.scale.contiguous()),
        dtype(dtype_of(operand.data)),
        tiled(operand.tiled) {}
};

GroupedKernelArgs arguments_of(const Contiguous& a, const Contiguous& b, const std::optional<Tensor>& offsets,
                               ScaleKind scales) {
  GroupedKernelArgs args{};
  args.scale_kind = scales;
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
  args.vectors = aligned_rows(a.data) && aligned_rows(b.data);
  return args;
}

// Room for the lines with aligned groups.
Tensor moved(const Tensor& lines, int64_t groups) {
  return empty(lines, {lines.size(0), quantize::aligned_length(lines.size(1), groups)}, lines.scalar_type());
}

Lines lines_of(const Tensor& from, const Tensor& to) {
  return {static_cast<const uint8_t*>(from.const_data_ptr()), static_cast<uint8_t*>(to.mutable_data_ptr()),
          from.size(0)};
}

}  // namespace

bool has_code_kernels_cuda(const Tensor& like) { return kBuiltForHopper && is_hopper(like.device().index()); }

bool code_product_out_cuda(const CodeProduct& product, const Tensor& out) {
  const CudaScope scope(product.a.data);
  const bool microscaled = product.scales == ScaleKind::kMx || product.scales == ScaleKind::kNv;
  if (microscaled && !product.list.empty()) return false;
  const Contiguous a(product.a), b(product.b);
  std::vector<Tensor> matrices;  // of the list, until the kernels are in the stream
  matrices.reserve(product.list.size());
  for (const Tensor& matrix : product.list) matrices.push_back(contiguous_codes(matrix));
  const DeviceList list(matrices, a.data);
  const auto bias = as_float(product.bias), bias_scale = as_float(product.bias_scale);
  const auto alpha = as_float(product.alpha), beta = as_float(product.beta);
  GroupedKernelArgs args = arguments_of(a, b, product.offsets, product.scales);
  args.vectors = args.vectors && std::all_of(matrices.begin(), matrices.end(), aligned_rows);
  args.list = list.get();
  args.options = product.options;
  args.out = out.mutable_data_ptr();
  args.alpha = float_or_null(alpha);
  args.beta = float_or_null(beta);
  args.zeroes_tail = product.offsets.has_value() && !product.beta;
  args.bias = float_or_null(bias);
  args.bias_scale = float_or_null(bias_scale);
  args.rows = a.data.size(0);
  args.n = b.data.size(-2);
  args.k = a.data.size(1) * (args.dtype == DType::kFloat4E2M1 ? 2 : 1);
  args.out_row_stride = row_stride(out);
  args.out_dtype = to_dtype(out.scalar_type());
  if (args.groups == 0 || !hopper_takes(GroupedMode::kForward, args)) return false;
  Tensor values;  // until the kernels are in the stream
  if (args.scale_kind == ScaleKind::kMx || args.scale_kind == ScaleKind::kNv) {
    const int64_t columns = widened_columns(args.k), bytes = args.rows * columns * 2;
    values = empty(out, {bytes + ready_words(args.rows) * 4}, at::kByte);
    args.a_values = values.mutable_data_ptr();
    args.a_ready = static_cast<uint8_t*>(args.a_values) + bytes;
  }
  launch_hopper(GroupedMode::kForward, args, scope.stream());
  return true;
}

bool code_reduction_out_cuda(const CodeReduction& reduction, const Tensor& out, bool accumulate) {
  const CudaScope scope(reduction.grad.data);
  const Contiguous grad(reduction.grad), input(reduction.input);
  const auto alpha = as_float(reduction.alpha), beta = as_float(reduction.beta);
  GroupedKernelArgs args = arguments_of(grad, input, reduction.offsets, reduction.scales);
  args.options = reduction.options;
  args.alpha = float_or_null(alpha);
  args.beta = float_or_null(beta);
  args.out = out.mutable_data_ptr();
  args.rows = grad.data.size(1) - (reduction.aligned ? quantize::aligned_length(0, args.groups) : 0);
  args.m = grad.data.size(0);
  args.n = input.data.size(0);
  args.out_row_stride = out.dim() == 3 ? out.stride(1) : row_stride(out);
  args.out_group_stride = out.dim() == 3 ? out.stride(0) : args.m * args.out_row_stride;
  args.out_dtype = to_dtype(out.scalar_type());
  args.accumulate = accumulate;
  if (reduction.aligned && !args.vectors) return false;
  args.all_moved = reduction.aligned || !args.vectors;
  args.vectors = true;
  if (args.groups == 0 || !hopper_takes(GroupedMode::kWeightGrad, args)) return false;
  Tensor grad_moved, input_moved;  // until the kernels are in the stream
  if (reduction.aligned) {
    args.a_moved = args.a;
    args.b_moved = args.b;
  } else if (reduction.offsets || args.all_moved) {
    grad_moved = moved(grad.data, args.groups);
    input_moved = moved(input.data, args.groups);
    args.a_moved = grad_moved.const_data_ptr();
    args.b_moved = input_moved.const_data_ptr();
    launch_align_groups(lines_of(grad.data, grad_moved), lines_of(input.data, input_moved), args.offsets,
                        args.groups, args.rows, args.all_moved, scope.stream());
  }
  launch_hopper(GroupedMode::kWeightGrad, args, scope.stream());
  return true;
}

}  // namespace transformer_plugin::gemm

#endif
