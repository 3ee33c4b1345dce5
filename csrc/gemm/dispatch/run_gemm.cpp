#include "gemm/dispatch/run_gemm.h"

#include <ATen/ops/cat.h>

#include <vector>

#include "common/row_index.h"
#include "common/tensor.h"
#include "gemm/dispatch/quantized_operands.h"
#include "gemm/dispatch/rowwise_gemm.h"
#include "gemm/generic/dense_gemm.h"

#ifdef TRANSFORMER_PLUGIN_CUDA
#include "gemm/dispatch/gemm_cuda.h"
#endif

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;

// Of plain operands, by torch.
Tensor run_dense(const GemmProblem& problem, at::ScalarType dtype, at::TensorList out) {
  const Tensor &a = problem.a.data, &stored = problem.b.data;
  const Tensor b = problem.direction == GemmDirection::kFprop ? transposed_view(stored) : stored;
  if (out.empty()) return dense_gemm(a, b, problem.bias, dtype, problem.alpha);
  dense_gemm_out(a, b, problem.bias, problem.alpha, problem.beta, out[0], problem.accumulate);
  return out[0];
}

void take_indexed_rows(Quantized& operand, const Tensor& offsets) {
  if (!operand.row_index.defined()) return;
  operand.data = take_rows(operand.data, operand.row_index, offsets);
  operand.row_index = Tensor();
}

// out = product + beta * out, with the product in a temporary of the dtype of sums.
void grouped_gemm_with_beta_cpu(const GemmProblem& problem, const Tensor& out) {
  const at::ScalarType wide = sum_dtype(problem.a.data.scalar_type());
  const Tensor sums = empty(problem.a.data, {problem.rows(), problem.columns()}, wide);
  grouped_gemm_cpu(problem, sums);
  const Tensor beta = problem.beta->contiguous();
  const int32_t* offsets = problem.offsets.const_data_ptr<int32_t>();
  for (int64_t g = 0; g < problem.groups(); ++g) {
    const int64_t begin = offsets[g], rows = offsets[g + 1] - begin;
    if (rows == 0) continue;
    const float factor = beta.const_data_ptr<float>()[g];
    Tensor sum = sums.narrow(0, begin, rows), out_g = out.narrow(0, begin, rows);
    if (factor != 0) sum.add_(out_g.to(wide), factor);
    out_g.copy_(sum);
  }
}

Tensor run_grouped_cpu(GemmProblem problem, at::ScalarType dtype, at::TensorList given) {
  take_indexed_rows(problem.a, problem.offsets);
  take_indexed_rows(problem.b, problem.offsets);
  const Tensor &a = problem.a.data, &b = problem.b.data;
  if (problem.is_wgrad()) {
    const Tensor out = given.empty() ? empty(a, {problem.groups(), a.size(1), b.size(1)}, dtype) : given[0];
    out.dim() == 2 ? grouped_wgrad_cpu(problem, given) : grouped_wgrad_cpu(problem, out.unbind());
    return out;
  }
  const Tensor out = given.empty() ? empty(a, {a.size(0), problem.columns()}, dtype) : given[0];
  problem.beta ? grouped_gemm_with_beta_cpu(problem, out) : grouped_gemm_cpu(problem, out);
  return out;
}

// Stacks tensors of one size, or concatenates them if each is `one_number`. Copies bytes, because torch
// cannot copy E2M1.
Tensor stacked(at::TensorList list, bool one_number) {
  const Tensor& first = list[0];
  std::vector<Tensor> parts;
  parts.reserve(list.size());
  for (const Tensor& tensor : list) {
    parts.push_back(tensor.element_size() == 1 ? tensor.view(at::kByte) : tensor);
  }
  const Tensor joined = at::cat(parts);
  std::vector<int64_t> sizes{static_cast<int64_t>(list.size())};
  if (!one_number) sizes.insert(sizes.end(), first.sizes().begin(), first.sizes().end());
  return joined.view(sizes).view(first.scalar_type());
}

#ifdef TRANSFORMER_PLUGIN_CUDA

Tensor new_output(const GemmProblem& problem, const GemmDesc& desc, at::ScalarType dtype) {
  if (problem.is_wgrad()) return empty(problem.a.data, {desc.groups, desc.m, desc.n}, dtype);
  return empty(problem.a.data, {desc.rows, desc.n}, dtype);
}

#endif

}  // namespace

Tensor run_gemm(const GemmProblem& problem, at::ScalarType dtype, at::TensorList given) {
  const bool by_torch = problem.is_dense() && !problem.is_quantized();
  if (by_torch) return run_dense(problem, dtype, given);
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (problem.a.data.is_cuda()) {
    const bool joins_scales = !problem.list_scales.empty();
    if (joins_scales) return run_gemm(with_stacked_list(problem, false), dtype, given);
    const CudaScope scope(problem.a.data);
    GemmDesc desc = describe_gemm(problem, dtype, given);
    const Selection selection = select_gemm(desc, gpu_of(problem.a.data));
    if (selection.backend == Backend::kSteps) return run_gemm_in_steps(problem, dtype, given);
    if (selection.copy == GemmCopy::kStack) return run_gemm(with_stacked_list(problem, true), dtype, given);
    void* const stream = scope.stream();
    if (selection.backend == Backend::kTorch) return torch_product({problem, desc, selection, stream});
    const Tensor out = given.empty() ? new_output(problem, desc, dtype) : given[0];
    if (selection.direction != desc.direction) desc = as_wgrad(desc);
    const SelectedGemm gemm{problem, desc, selection, stream};
    const at::TensorList written = given.empty() ? at::TensorList(out) : given;
    desc.is_wgrad() ? multiply_columns(gemm, written) : multiply_rows(gemm, out);
    return out;
  }
#endif
  return problem.is_quantized() ? run_gemm_in_steps(problem, dtype, given)
                                : run_grouped_cpu(problem, dtype, given);
}

// On a CPU the matrices of a grouped GEMM are dequantized when a thread reaches their group.
Tensor run_gemm_in_steps(const GemmProblem& problem, at::ScalarType dtype, at::TensorList out) {
  const bool on_cpu = problem.a.data.is_cpu(), by_row = problem.b.format.traits().has_row_scales;
  if (!problem.list.empty() && (by_row || !on_cpu)) {
    return run_gemm_in_steps(with_stacked_list(problem, true), dtype, out);
  }
  if (by_row) return run_rowwise_gemm(problem, dtype, out);
  const bool one_at_a_time = on_cpu && !problem.is_dense() && !problem.is_wgrad();
  return run_gemm(dequantized(problem, !one_at_a_time), dtype, out);
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

GemmProblem with_stacked_list(const GemmProblem& problem, bool copy_data) {
  GemmProblem result = problem;
  Quantized& b = result.b;
  if (const auto stack = as_contiguous_stack(problem.list)) {
    b.data = *stack;
    result.list = {};
  } else if (copy_data) {
    b.data = stacked(problem.list, false);
    result.list = {};
  }
  const size_t matrices = problem.list.size();
  if (problem.list_scales.empty()) return result;
  const bool one_scale = b.format.family == FormatFamily::kFp8Tensor;
  b.scale = stacked(problem.list_scales.slice(0, matrices), one_scale);
  if (b.format.is_nv()) b.amax = stacked(problem.list_scales.slice(matrices), !b.format.row_scaled);
  result.list_scales = {};
  return result;
}

}  // namespace transformer_plugin::gemm
