#include "gemm/args/grouped_bias_backward.h"

#include <ATen/ops/mv.h>
#include <ATen/ops/ones.h>

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/ops/gemm.h"
#include "common/register.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/generic/dense_gemm.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "grouped_bias_backward";

// Checks, and allocates the outputs; the same for every backend.
std::tuple<Tensor, Tensor> bias_backward_outputs(const Tensor& grad, const Tensor& group_sizes,
                                                 const OptionalTensor& bias,
                                                 const OptionalTensor& bias_scale) {
  const Argument grad_argument{kOp, "grad", grad};
  check_grouped_operand(grad_argument, 2);
  check_group_sizes({kOp, "group_sizes", group_sizes}, grad_argument);
  if (bias) check_bias({kOp, "bias", *bias}, grad_argument, group_sizes.sym_size(0), grad.sym_size(1));
  if (bias_scale) check_bias_scale({kOp, "bias_scale", *bias_scale}, true, grad_argument);
  const c10::SymInt rows = bias && bias_scale ? grad.sym_size(0) : c10::SymInt(0);
  return {empty(grad, {group_sizes.sym_size(0), grad.sym_size(1)}, sum_dtype(grad.scalar_type())),
          empty(grad, {rows}, at::kFloat)};
}

// float64 on a CPU, for gradcheck.
void bias_backward_double(const Tensor& grad, const Tensor& offsets, const OptionalTensor& bias,
                          const OptionalTensor& bias_scale, const Tensor& grad_bias,
                          const Tensor& grad_scale) {
  const int32_t* begins = offsets.const_data_ptr<int32_t>();
  if (grad_scale.numel() > 0) grad_scale.zero_();
  for (int64_t g = 0; g < grad_bias.size(0); ++g) {
    const int64_t rows = begins[g + 1] - begins[g];
    const Tensor grad_g = grad.narrow(0, begins[g], rows);
    const Tensor ones = at::ones({rows}, grad.options());
    const Tensor scale = bias_scale ? bias_scale->narrow(0, begins[g], rows).to(at::kDouble) : ones;
    grad_bias.select(0, g).copy_(at::mv(grad_g.t(), scale));
    if (!bias || !bias_scale) continue;
    grad_scale.narrow(0, begins[g], rows).copy_(at::mv(grad_g, bias->select(0, g).to(at::kDouble)));
  }
}

template <typename Launch>
std::tuple<Tensor, Tensor> bias_backward(const Tensor& grad, const Tensor& group_sizes,
                                         const OptionalTensor& bias, const OptionalTensor& bias_scale,
                                         Launch&& launch) {
  auto outputs = bias_backward_outputs(grad, group_sizes, bias, bias_scale);
  const auto& [grad_bias, grad_scale] = outputs;
  const BelowAutograd guard;
  const Tensor offsets = group_offsets({kOp, "group_sizes", group_sizes}, {kOp, "grad", grad}, grad.size(0));
  if (grad.scalar_type() == at::kDouble) {
    bias_backward_double(grad, offsets, bias, bias_scale, grad_bias, grad_scale);
    return outputs;
  }
  const Tensor g = grad.contiguous();
  const Tensor b = bias && bias_scale ? bias->to(at::kFloat).contiguous() : Tensor();
  const Tensor s = bias_scale ? bias_scale->contiguous() : Tensor();
  const int64_t rows = g.size(0), groups = group_sizes.size(0), columns = g.size(1);
  const Tensor partial = empty(grad, {ColumnSums::slots(rows, groups), columns}, at::kFloat);
  launch(GroupedBiasBackwardArgs{g.const_data_ptr(),
                                 b.defined() ? b.const_data_ptr<float>() : nullptr,
                                 s.defined() ? s.const_data_ptr<float>() : nullptr,
                                 {partial.mutable_data_ptr<float>(), grad_bias.mutable_data_ptr<float>(),
                                  offsets.const_data_ptr<int32_t>(), groups, rows, columns},
                                 b.defined() ? grad_scale.mutable_data_ptr<float>() : nullptr,
                                 to_dtype(g.scalar_type())});
  return outputs;
}

}  // namespace

TP_IMPL_FOR(
    CPU, grouped_bias_backward,
    +[](const Tensor& grad, const Tensor& group_sizes, const OptionalTensor& bias,
        const OptionalTensor& bias_scale) {
      return bias_backward(grad, group_sizes, bias, bias_scale, grouped_bias_backward_cpu);
    });
TP_IMPL_FOR(Meta, grouped_bias_backward, bias_backward_outputs);

// Not differentiable: the results have no gradient.
TP_FALL_THROUGH(Autograd, grouped_bias_backward);

#ifdef TRANSFORMER_PLUGIN_CUDA
TP_IMPL_FOR(
    CUDA, grouped_bias_backward,
    +[](const Tensor& grad, const Tensor& group_sizes, const OptionalTensor& bias,
        const OptionalTensor& bias_scale) {
      const CudaScope scope(grad);
      return bias_backward(grad, group_sizes, bias, bias_scale, [&](const GroupedBiasBackwardArgs& args) {
        launch_grouped_bias_backward(args, scope.stream());
      });
    });
#endif

}  // namespace transformer_plugin::gemm
