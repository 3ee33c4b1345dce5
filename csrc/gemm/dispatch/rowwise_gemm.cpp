#include "gemm/dispatch/rowwise_gemm.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>

#include "common/tensor.h"
#include "gemm/args/rowwise_scales.h"
#include "gemm/dispatch/quantized_operands.h"
#include "gemm/dispatch/run_gemm.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// FP32 sums of exact products, of the rows of groups. On a CPU the matrix of one group is converted at a time.
Tensor sums_of(const GemmProblem& problem) {
  const Tensor& b = problem.b.data;
  const at::ScalarType exact = b.is_cpu() ? at::kFloat : at::kBFloat16;
  const bool one_at_a_time = b.is_cpu() && !problem.is_dense();
  return run_gemm({.direction = problem.direction,
                   .a = {problem.a.data.to(exact), {}, {}},
                   .b = {one_at_a_time ? b : b.to(exact), {}, {}},
                   .offsets = problem.offsets,
                   .zero_tail = false,
                   .options = problem.options},
                  at::kFloat);
}

const float* floats(const OptionalTensor& tensor) {
  return tensor ? tensor->const_data_ptr<float>() : nullptr;
}

OptionalTensor contiguous_floats(const OptionalTensor& tensor) {
  return tensor ? OptionalTensor(tensor->to(at::kFloat).contiguous()) : std::nullopt;
}

Tensor scaled(const GemmProblem& problem, const Tensor& sums, at::ScalarType dtype) {
  const Tensor a_scale = problem.a.scale.contiguous(), b_scale = problem.b.scale.contiguous();
  const OptionalTensor alpha = contiguous_floats(problem.alpha), bias = contiguous_floats(problem.bias),
                       bias_scale = contiguous_floats(problem.bias_scale);
  const Tensor out = dtype == at::kFloat ? sums : empty(sums, sums.sym_sizes(), dtype);
  const RowwiseScaleArgs args{sums.const_data_ptr<float>(),
                              out.mutable_data_ptr(),
                              a_scale.const_data_ptr<float>(),
                              b_scale.const_data_ptr<float>(),
                              floats(alpha),
                              floats(bias),
                              floats(bias_scale),
                              problem.is_dense() ? nullptr : problem.offsets.const_data_ptr<int32_t>(),
                              sums.size(0),
                              problem.groups(),
                              sums.size(1),
                              to_dtype(dtype),
                              problem.zero_tail};
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (sums.is_cuda()) {
    const CudaScope scope(sums);
    launch_scale_rowwise(args, scope.stream());
    return out;
  }
#endif
  scale_rowwise_cpu(args);
  return out;
}

// sums + beta * out, where a beta of 0 takes nothing of `out`.
Tensor mixed(const Tensor& sums, const Tensor& beta, const Tensor& out) {
  return at::where(beta.eq(0), sums, sums.addcmul(beta, out.to(at::kFloat)));
}

// The group of each row, and G past the last group.
Tensor group_of_rows(const Tensor& offsets, int64_t rows) {
  const Tensor index = at::arange(rows, offsets.options());
  return at::searchsorted(offsets.narrow(0, 1, offsets.size(0) - 1), index, /*out_int32=*/false,
                          /*right=*/true);
}

}  // namespace

Tensor run_rowwise_gemm(const GemmProblem& problem, at::ScalarType dtype, at::TensorList given) {
  if (given.empty()) return scaled(problem, sums_of(problem), dtype);
  const Tensor sums = scaled(problem, sums_of(problem), at::kFloat);
  Tensor out = given[0];
  const OptionalTensor beta = beta_or_one(problem, out);
  if (!beta) {
    out.copy_(sums);
  } else if (problem.is_dense()) {
    out.copy_(mixed(sums, *beta, out));
  } else if (beta->size(0) > 0) {
    const Tensor group = group_of_rows(problem.offsets, out.size(0)).unsqueeze(1);
    const int64_t groups = beta->size(0);
    const Tensor factors = beta->index_select(0, group.clamp_max(groups - 1).squeeze(1)).unsqueeze(1);
    out.copy_(at::where(group.eq(groups), out.to(at::kFloat), mixed(sums, factors, out)));
  }
  return out;
}

}  // namespace transformer_plugin::gemm
