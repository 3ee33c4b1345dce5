// gather_rows_backward: the gradient of gathering rows by an index, as grouped_gemm does with `rows`.

#include <limits>

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/ops/gemm.h"
#include "common/register.h"
#include "common/row_index.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;

constexpr const char* kOp = "gather_rows_backward";

Tensor gather_rows_backward_meta(const Tensor& grad, const Tensor& rows, const Tensor& group_sizes,
                                 c10::SymInt num_rows) {
  const Argument grad_argument{kOp, "grad", grad};
  const Argument rows_argument{kOp, "rows", rows};
  check_grouped_operand(grad_argument, 2);
  check_row_index(rows_argument, grad_argument);
  check_size(rows_argument, 0, grad.sym_size(0), "the rows of 'grad'");
  check_group_sizes({kOp, "group_sizes", group_sizes}, grad_argument);
  TP_CHECK_VALUE(num_rows >= 0 && num_rows <= std::numeric_limits<int32_t>::max(), kOp, "num_rows",
                 "from 0 to 2^31 - 1", num_rows, "Pass the rows of the matrix that 'rows' points into");
  return empty(grad, {num_rows, grad.sym_size(1)}, grad.scalar_type());
}

Tensor gather_rows_backward(const Tensor& grad, const Tensor& rows, const Tensor& group_sizes,
                            int64_t num_rows) {
  gather_rows_backward_meta(grad, rows, group_sizes, num_rows);
  const BelowAutograd guard;
  const Tensor offsets = group_offsets({kOp, "group_sizes", group_sizes}, {kOp, "grad", grad}, grad.size(0));
  return sum_taken_rows(grad, rows, offsets, num_rows);
}

}  // namespace

// Not differentiable: the results have no gradient.
TP_IMPL_NO_GRADIENT(gather_rows_backward, gather_rows_backward, gather_rows_backward_meta);

}  // namespace transformer_plugin::gemm
