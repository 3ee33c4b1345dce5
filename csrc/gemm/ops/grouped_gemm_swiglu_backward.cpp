// grouped_gemm_swiglu_backward: the gradients of SwiGLU's input and of its probability, from the gradient of the output of the
// following grouped GEMM.

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/register.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/swiglu_gemm.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "grouped_gemm_swiglu_backward";

TwoTensors grouped_gemm_swiglu_backward_meta(const Tensor& grad, const Tensor& b, const Tensor& group_sizes,
                                             const Tensor& h, const OptionalTensor& probs, int64_t interleave,
                                             int64_t max_sms, int64_t expected_rows) {
  const Argument grad_argument{kOp, "grad", grad}, b_argument{kOp, "b", b}, h_argument{kOp, "h", h};
  check_dtype(grad_argument, kFloatTypes);
  check_dim(grad_argument, 2);
  check_pair(b_argument, grad_argument, 3);
  check_size(b_argument, 1, grad.sym_size(1), "the columns of 'grad', summed over");
  check_pair(h_argument, grad_argument, 2);
  check_size(h_argument, 0, grad.sym_size(0), "the rows of 'grad'");
  check_size(h_argument, 1, b.sym_size(2) * 2, "gate and linear part for each column of 'b'");
  check_interleave(kOp, interleave);
  check_interleaved_columns(h_argument, b.sym_size(2), interleave);
  check_groups({kOp, "group_sizes", group_sizes}, grad_argument, b_argument);
  if (probs) check_probs({kOp, "probs", *probs}, grad_argument);
  check_launch_options(kOp, {max_sms, expected_rows});
  const c10::SymInt rows = probs ? grad.sym_size(0) : c10::SymInt(0);
  return {empty(h, h.sym_sizes(), h.scalar_type()), empty(h, {rows}, at::kFloat)};
}

TwoTensors grouped_gemm_swiglu_backward(const Tensor& grad, const Tensor& b, const Tensor& group_sizes,
                                        const Tensor& h, const OptionalTensor& probs, int64_t interleave,
                                        int64_t max_sms, int64_t expected_rows) {
  grouped_gemm_swiglu_backward_meta(grad, b, group_sizes, h, probs, interleave, max_sms, expected_rows);
  const BelowAutograd guard;
  const Tensor offsets = group_offsets({kOp, "group_sizes", group_sizes}, {kOp, "grad", grad}, grad.size(0));
  return run_gemm_swiglu_backward(
      {grad, b, offsets, h, probs, interleave, LaunchOptions{max_sms, expected_rows}});
}

}  // namespace

// Not differentiable: the results have no gradient.
TP_IMPL_NO_GRADIENT(kOp, grouped_gemm_swiglu_backward, grouped_gemm_swiglu_backward_meta);

}  // namespace transformer_plugin::gemm
