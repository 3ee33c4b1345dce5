// gemm_rowwise: the product of two matrices of FP8 codes with a scale for each row.
#include <torch/library.h>

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

TORCH_LIBRARY_IMPL(transformer_plugin, CPU, m) { m.impl(kOp, gemm_rowwise<rowwise_product>); }
TORCH_LIBRARY_IMPL(transformer_plugin, Meta, m) { m.impl(kOp, gemm_rowwise<rowwise_product_meta>); }
// Not differentiable: results have no gradient.
TORCH_LIBRARY_IMPL(transformer_plugin, Autograd, m) { m.impl(kOp, torch::CppFunction::makeFallthrough()); }
#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin, CUDA, m) { m.impl(kOp, gemm_rowwise<rowwise_product>); }
#endif

}  // namespace transformer_plugin::gemm
