// grouped_gemm_rowwise: grouped GEMM of FP8 operands with a scale for each row.

#include "common/register.h"
#include "gemm/dispatch/rowwise_gemm.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "grouped_gemm_rowwise";

template <Tensor (*run)(const RowwiseProduct&)>
Tensor grouped_gemm_rowwise(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                            const Tensor& group_sizes, at::ScalarType dtype, const OptionalTensor& alpha,
                            const OptionalTensor& bias, const OptionalTensor& bias_scale, int64_t max_sms,
                            int64_t expected_rows) {
  return run(
      {kOp, a, a_scale, b, b_scale, &group_sizes, alpha, bias, bias_scale, dtype, {max_sms, expected_rows}});
}

}  // namespace

// Not differentiable: the results have no gradient.
TP_IMPL_NO_GRADIENT(kOp, grouped_gemm_rowwise<rowwise_product>, grouped_gemm_rowwise<rowwise_product_meta>);

}  // namespace transformer_plugin::gemm
