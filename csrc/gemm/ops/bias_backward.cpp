// bias_backward: the gradient of a bias, the sums over the rows of a gradient. The kernel is that of
// grouped_bias_backward, for one group of all rows.
#include <ATen/ops/sum.h>

#include "common/autograd.h"
#include "common/ops/gemm.h"
#include "common/register.h"
#include "common/tensor.h"
#include "gemm/args/grouped_bias_backward.h"
#include "gemm/dispatch/checks.h"
#include "gemm/generic/dense_gemm.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;

constexpr const char* kOp = "bias_backward";

// Checks, and allocates the output; the same for every backend.
Tensor bias_backward_output(const Tensor& grad) {
  check_operand({kOp, "grad", grad}, 2);
  return empty(grad, {grad.sym_size(1)}, sum_dtype(grad.scalar_type()));
}

template <typename Launch>
Tensor bias_backward(const Tensor& grad, Launch&& launch) {
  const Tensor grad_bias = bias_backward_output(grad);
  const BelowAutograd guard;
  if (grad.scalar_type() == at::kDouble)
    return at::sum(grad, {0});  // float64 is supported on a CPU for gradcheck
  const Tensor g = grad.contiguous();
  const int64_t rows = g.size(0), columns = g.size(1);
  const Tensor partial = empty(grad, {ColumnSums::slots(rows, 1), columns}, at::kFloat);
  launch(GroupedBiasBackwardArgs{
      g.const_data_ptr(),
      nullptr,
      nullptr,
      {partial.mutable_data_ptr<float>(), grad_bias.mutable_data_ptr<float>(), nullptr, 1, rows, columns},
      nullptr,
      to_dtype(g.scalar_type())});
  return grad_bias;
}

}  // namespace

TP_IMPL_FOR(
    CPU, bias_backward, +[](const Tensor& grad) { return bias_backward(grad, grouped_bias_backward_cpu); });
TP_IMPL_FOR(Meta, bias_backward, bias_backward_output);

// Not differentiable: the result has no gradient.
TP_FALL_THROUGH(Autograd, bias_backward);

#ifdef TRANSFORMER_PLUGIN_CUDA
TP_IMPL_FOR(
    CUDA, bias_backward, +[](const Tensor& grad) {
      const CudaScope scope(grad);
      return bias_backward(grad, [&](const GroupedBiasBackwardArgs& args) {
        launch_grouped_bias_backward(args, scope.stream());
      });
    });
#endif

}  // namespace transformer_plugin::gemm
