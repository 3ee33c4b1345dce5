// gemm_rowwise: the product of two FP8 matrices with a scale for each row.

#include "common/register.h"
#include "gemm/dispatch/rowwise_gemm.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char* kOp = "gemm_rowwise";

template <Tensor (*run)(const RowwiseProduct&)>
Tensor gemm_rowwise(const Tensor& a, const Tensor& a_scale, const Tensor& b, const Tensor& b_scale,
                    at::ScalarType dtype, const OptionalTensor& alpha, const OptionalTensor& bias) {
  const OptionalTensor none;
  return run({kOp, a, a_scale, b, b_scale, nullptr, alpha, bias, none, dtype});
}

}  // namespace

// Not differentiable: the results have no gradient.
TP_IMPL_NO_GRADIENT(kOp, gemm_rowwise<rowwise_product>, gemm_rowwise<rowwise_product_meta>);

}  // namespace transformer_plugin::gemm
