// GEMMs on CUDA, by the kernel that select_gemm named. No size or index is read on the host.
#ifdef TRANSFORMER_PLUGIN_CUDA

#include "gemm/dispatch/gemm_cuda.h"

#include <ATen/ops/_grouped_mm.h>

#include <vector>

#include "common/tensor.h"
#include "gemm/dispatch/quantized_operands.h"
#include "gemm/sm90/align_groups.h"
#include "gemm/sm90/gather/gather.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;

// torch cannot copy E2M1, so the bytes of quantized data are copied.
Tensor contiguous_data(const Tensor& data) {
  if (data.is_contiguous()) return data;
  return data.element_size() == 1 ? data.view(at::kByte).contiguous() : data.contiguous();
}

// The rows of an operand; a copy of them if there is an index.
Tensor rows_of(const Quantized& operand, const Tensor& offsets) {
  const bool index = operand.row_index.defined();
  return index ? take_rows(operand.data, operand.row_index, offsets) : contiguous_data(operand.data);
}

Tensor contiguous_scale(const Quantized& operand) {
  return operand.scale.defined() ? operand.scale.contiguous() : Tensor();
}

const void* pointer_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

// The stack, or the matrices of the list.
std::vector<Tensor> matrices_of(const GemmProblem& problem) {
  std::vector<Tensor> held;
  held.reserve(problem.list.empty() ? 1 : problem.list.size());
  if (problem.list.empty()) held.push_back(contiguous_data(problem.b.data));
  for (const Tensor& matrix : problem.list) held.push_back(contiguous_data(matrix));
  return held;
}

// MXFP8 and NVFP4: the workspace for the dequantized rows and their counters.
Tensor set_workspace(GroupedGemmArgs& args, const Tensor& like) {
  if (args.scaling != OperandScaling::kMx && args.scaling != OperandScaling::kNv) return {};
  const int64_t bytes = args.rows * dequantized_columns(args.k) * 2;
  const Tensor workspace = empty(like, {bytes + ready_counters(args.rows) * 4}, at::kByte);
  args.a_dequantized = workspace.mutable_data_ptr();
  args.a_ready_rows = static_cast<uint8_t*>(args.a_dequantized) + bytes;
  return workspace;
}

}  // namespace

GroupedGemmArgs SelectedGemm::args() const {
  GroupedGemmArgs args = args_of(desc);
  if (!problem.is_dense()) args.offsets = problem.offsets.const_data_ptr<int32_t>();
  if (problem.is_quantized()) args.scaling = *operand_scaling(desc.direction, desc.a_format, desc.b_format);
  return args;
}

void multiply_rows(const SelectedGemm& gemm, const Tensor& out) {
  const GemmProblem& problem = gemm.problem;
  const std::vector<Tensor> matrices = matrices_of(problem);
  const Tensor a = gemm.gathers() ? Tensor() : rows_of(problem.a, problem.offsets);
  const Tensor a_scale = contiguous_scale(problem.a), b_scale = contiguous_scale(problem.b);
  const DevicePointerArray list(problem.list.empty() ? at::TensorList() : matrices, out);
  const auto bias = as_float(problem.bias), bias_scale = as_float(problem.bias_scale);
  const auto alpha = as_float(alpha_and_amaxes(problem)), beta = as_float(beta_or_one(problem, out));
  GroupedGemmArgs args = gemm.args();
  args.a = pointer_or_null(a);
  args.b = matrices[0].const_data_ptr();
  args.a_scale = pointer_or_null(a_scale);
  args.b_scale = pointer_or_null(b_scale);
  args.list = list.get();
  args.out = out.mutable_data_ptr();
  args.alpha = float_or_null(alpha);
  args.beta = float_or_null(beta);
  args.bias = float_or_null(bias);
  args.bias_scale = float_or_null(bias_scale);
  args.accumulate = false;  // that of a dense product is a beta of 1
  args.zero_tail = problem.zero_tail && !problem.is_dense() && !beta;
  const Tensor workspace = set_workspace(args, out);
  if (!gemm.gathers()) return gemm.launcher(args)(args, gemm.selection.config, gemm.stream);
  const bool fprop = gemm.desc.direction == GemmDirection::kFprop;
  const auto launch = fprop ? fprop_gather(args.dtype) : dgrad_gather(args.dtype);
  launch(args, gemm.gathered_rows(), gemm.selection.config, gemm.stream);
}

namespace {

// Quantized operands in the `aligned` layout of groups, where the kernel reads it: their own data, or copies.
struct AlignedGroups {
  Tensor a, b;

  AlignedGroups(const SelectedGemm& gemm, const Tensor& a_data, const Tensor& b_data, GroupedGemmArgs& args) {
    const GemmCopy copy = gemm.selection.copy;
    const bool copies_all = copy == GemmCopy::kAlignAllGroups;
    if (copies_all || copy == GemmCopy::kAlignGroups) {
      a = aligned_copy(a_data, args.groups);
      b = aligned_copy(b_data, args.groups);
      launch_align_groups(operand_copy(a_data, a), operand_copy(b_data, b), args.offsets, args.groups,
                          args.rows, copies_all, gemm.stream);
    } else if (!gemm.problem.is_dense()) {
      a = a_data;
      b = b_data;
    }
    args.a_group_aligned = pointer_or_null(a);
    args.b_group_aligned = pointer_or_null(b);
    args.read_all_group_aligned = copies_all || (copy == GemmCopy::kNone && !gemm.problem.is_dense());
  }

 private:
  static Tensor aligned_copy(const Tensor& lines, int64_t groups) {
    return empty(lines, {lines.size(0), quantize::aligned_length(lines.size(1), groups)},
                 lines.scalar_type());
  }
  static OperandCopy operand_copy(const Tensor& from, const Tensor& to) {
    return {static_cast<const uint8_t*>(from.const_data_ptr()), static_cast<uint8_t*>(to.mutable_data_ptr()),
            from.size(0)};
  }
};

}  // namespace

void multiply_columns(const SelectedGemm& gemm, at::TensorList out) {
  const GemmProblem& problem = gemm.problem;
  const Tensor b = rows_of(problem.b, problem.offsets);
  const Tensor a = gemm.gathers() ? Tensor() : rows_of(problem.a, problem.offsets);
  const Tensor a_scale = contiguous_scale(problem.a), b_scale = contiguous_scale(problem.b);
  for (const Tensor& matrix : out) matrix.mutable_data_ptr();  // makes copy-on-write tensors writable
  const DevicePointerArray list(is_out_list(problem, out) ? out : at::TensorList(), b);
  const auto alpha = as_float(alpha_and_amaxes(problem)), beta = as_float(problem.beta);
  GroupedGemmArgs args = gemm.args();
  args.a = pointer_or_null(a);
  args.b = b.const_data_ptr();
  args.a_scale = pointer_or_null(a_scale);
  args.b_scale = pointer_or_null(b_scale);
  args.list = list.get();
  args.out = out[0].mutable_data_ptr();
  args.alpha = float_or_null(alpha);
  args.beta = float_or_null(beta);
  if (problem.is_quantized()) {
    const AlignedGroups aligned(gemm, a, b, args);
    return gemm.launcher(args)(args, gemm.selection.config, gemm.stream);
  }
  if (!gemm.gathers()) return gemm.launcher(args)(args, gemm.selection.config, gemm.stream);
  const bool float_out = args.out_dtype == DType::kFloat32;
  const auto launch = float_out ? wgrad_gather_fp32_out(args.dtype) : wgrad_gather(args.dtype);
  launch(args, gemm.gathered_rows(), gemm.selection.config, gemm.stream);
}

Tensor torch_product(const SelectedGemm& gemm) {
  const GemmProblem& problem = gemm.problem;
  const Tensor a = rows_of(problem.a, problem.offsets), b = rows_of(problem.b, problem.offsets);
  const Tensor ends = problem.offsets.narrow(0, 1, problem.groups());
  if (problem.is_wgrad()) return at::_grouped_mm(a.t(), b, ends);
  const bool fprop = problem.direction == GemmDirection::kFprop;
  const Tensor out = at::_grouped_mm(a, fprop ? b.transpose(1, 2) : b, ends);
  if (problem.zero_tail) zero_tail_rows(out, problem.offsets, gemm.stream);
  return out;
}

}  // namespace transformer_plugin::gemm

#endif
