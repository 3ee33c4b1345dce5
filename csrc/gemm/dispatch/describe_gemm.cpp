#include "gemm/dispatch/describe_gemm.h"

#include <algorithm>

#include "common/tensor.h"
#include "quantize/args/layout.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;

// Of the tensor once it is contiguous: a copy begins at a multiple of 16 bytes, as every new tensor.
bool begins_aligned(const Tensor& tensor) {
  return !tensor.is_contiguous() || reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

bool has_aligned_row_bytes(const Tensor& tensor) {
  return tensor.size(-1) * static_cast<int64_t>(tensor.element_size()) % 16 == 0;
}

// Rows that an index names are copied, or loaded by a kernel that reads the matrix as it is.
bool aligned_rows(const Quantized& operand) {
  return has_aligned_row_bytes(operand.data) && (operand.row_index.defined() || begins_aligned(operand.data));
}

bool aligned_scale(const Tensor& scale) { return !scale.defined() || begins_aligned(scale); }

bool aligned_pointer(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

void describe_index(const Quantized& a, GemmDesc& desc) {
  const Tensor& matrix = a.data;
  desc.index = a.row_index.defined();
  if (!desc.index) return;
  const int64_t stride_bytes = matrix.stride(0) * static_cast<int64_t>(matrix.element_size());
  desc.can_gather = matrix.stride(1) == 1;
  desc.index_fits_wgrad = a.row_index.scalar_type() != at::kLong && stride_bytes < (int64_t{1} << 31);
  desc.index_matrix_aligned = matrix.size(0) > 0 && aligned_pointer(matrix) && stride_bytes % 16 == 0;
}

void describe_rows(const GemmProblem& problem, at::TensorList out, GemmDesc& desc) {
  const Quantized &a = problem.a, &b = problem.b;
  desc.rows = problem.rows();
  desc.n = problem.columns();
  desc.k = a.row_length().expect_int();
  desc.out_row_stride = out.empty() ? desc.n : row_stride(out[0]);
  desc.is_list = !problem.list.empty();
  if (desc.is_list) desc.list_aligned = std::all_of(problem.list.begin(), problem.list.end(), begins_aligned);
  desc.rows_aligned = aligned_rows(a) && (desc.is_list ? has_aligned_row_bytes(b.data) : aligned_rows(b));
  desc.torch_computes_it = out.empty() && !problem.bias && !problem.alpha && !desc.is_list;
}

void describe_wgrad(const GemmProblem& problem, at::TensorList out, GemmDesc& desc) {
  const Tensor &grad = problem.a.data, &input = problem.b.data;
  const int64_t features = desc.is_quantized() ? 0 : 1;  // the dimension of `grad` that is not summed over
  const bool aligned_groups = desc.is_quantized() && desc.a_format.aligned_groups;
  desc.rows = desc.is_quantized() ? grad.size(1) : problem.rows();
  if (aligned_groups) desc.rows -= quantize::aligned_length(0, desc.groups);
  desc.m = grad.size(features);
  desc.n = input.size(features);
  desc.is_list = is_out_list(problem, out);
  if (desc.is_list) desc.list_aligned = std::all_of(out.begin(), out.end(), aligned_pointer);
  desc.out_row_stride = out.empty() ? desc.n : desc.is_list ? row_stride(out[0]) : out[0].stride(1);
  desc.out_group_stride = out.empty() || desc.is_list ? desc.m * desc.out_row_stride : out[0].stride(0);
  desc.rows_aligned = aligned_rows(problem.a) && aligned_rows(problem.b);
  desc.torch_computes_it = out.empty() && !problem.alpha;
}

}  // namespace

GemmDesc describe_gemm(const GemmProblem& problem, at::ScalarType dtype, at::TensorList out) {
  GemmDesc desc{};
  desc.direction = problem.direction;
  desc.a_format = problem.a.format;
  desc.b_format = problem.b.format;
  const bool quantized = desc.is_quantized();
  desc.dtype = quantized ? desc.a_format.element : to_dtype(problem.a.data.scalar_type());
  desc.b_dtype = quantized ? desc.b_format.element : desc.dtype;
  desc.out_dtype = to_dtype(dtype);
  desc.groups = problem.groups();
  desc.accumulate = problem.accumulate;
  desc.options = problem.options;
  desc.is_dense = problem.is_dense();
  desc.has_bias = problem.bias.has_value();
  desc.pointers_aligned = aligned_scale(problem.a.scale) &&
                          (!problem.list.empty() || aligned_scale(problem.b.scale)) &&
                          (out.empty() || aligned_pointer(out[0]));
  problem.is_wgrad() ? describe_wgrad(problem, out, desc) : describe_rows(problem, out, desc);
  describe_index(problem.a, desc);
  return desc;
}

GroupedGemmArgs args_of(const GemmDesc& desc) {
  GroupedGemmArgs args{};
  args.rows = desc.rows;
  args.groups = desc.groups;
  args.m = desc.m;
  args.n = desc.n;
  args.k = desc.k;
  args.out_group_stride = desc.out_group_stride;
  args.out_row_stride = desc.out_row_stride;
  args.dtype = desc.dtype;
  args.b_dtype = desc.b_dtype;
  args.out_dtype = desc.out_dtype;
  args.accumulate = desc.accumulate;
  args.a_tiled = desc.a_format.tiled_scales;
  args.b_tiled = desc.b_format.tiled_scales;
  args.rows_16_byte_aligned = desc.rows_aligned && (desc.is_wgrad() || desc.list_aligned);
  args.options = desc.options;
  return args;
}

}  // namespace transformer_plugin::gemm
