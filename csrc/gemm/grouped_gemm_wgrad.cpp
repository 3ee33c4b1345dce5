// grouped_gemm_wgrad: each group's gradient^T @ input, fresh or into a buffer that the caller gives.
#include <torch/library.h>

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/tensor.h"
#include "gemm/checks.h"
#include "gemm/grouped_product.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;
using OptionalDtype = std::optional<at::ScalarType>;

constexpr const char* kOp = "grouped_gemm_wgrad";
constexpr const char* kOutOp = "grouped_gemm_wgrad_out";

void check_wgrad(const char* op, const Tensor& grad, const Tensor& input, const Tensor& group_sizes) {
  const Argument grad_argument{op, "grad", grad};
  const Argument input_argument{op, "input", input};
  check_grouped_operand(grad_argument, 2);
  check_pair(input_argument, grad_argument, 2);
  check_size(input_argument, 0, grad.sym_size(0), "the rows of 'grad'");
  check_group_sizes({op, "group_sizes", group_sizes}, grad_argument);
}

Tensor wgrad_meta(const Tensor& grad, const Tensor& input, const Tensor& group_sizes, OptionalDtype dtype) {
  check_wgrad(kOp, grad, input, group_sizes);
  const at::ScalarType to = output_dtype({kOp, "grad", grad}, dtype);
  return empty(grad, {group_sizes.sym_size(0), grad.sym_size(1), input.sym_size(1)}, to);
}

Tensor wgrad(const Tensor& grad, const Tensor& input, const Tensor& group_sizes, OptionalDtype dtype) {
  check_wgrad(kOp, grad, input, group_sizes);
  const at::ScalarType to = output_dtype({kOp, "grad", grad}, dtype);
  const BelowAutograd guard;
  const Tensor offsets = group_offsets({kOp, "group_sizes", group_sizes}, {kOp, "grad", grad}, grad.size(0));
  return reduction_product({grad, input, offsets}, to);
}

void check_wgrad_out(const Tensor& grad, const Tensor& input, const Tensor& group_sizes, const Tensor& out) {
  check_wgrad(kOutOp, grad, input, group_sizes);
  const Argument grad_argument{kOutOp, "grad", grad};
  check_dtype(grad_argument, kFloatTypes);
  check_accumulator({kOutOp, "out", out}, grad_argument,
                    {group_sizes.sym_size(0), grad.sym_size(1), input.sym_size(1)});
}

void wgrad_out_meta(const Tensor& grad, const Tensor& input, const Tensor& group_sizes, const Tensor& out,
                    bool accumulate) {
  check_wgrad_out(grad, input, group_sizes, out);
}

void wgrad_out(const Tensor& grad, const Tensor& input, const Tensor& group_sizes, const Tensor& out,
               bool accumulate) {
  check_wgrad_out(grad, input, group_sizes, out);
  const BelowAutograd guard;
  const Tensor offsets =
      group_offsets({kOutOp, "group_sizes", group_sizes}, {kOutOp, "grad", grad}, grad.size(0));
  reduction_product_out({grad, input, offsets}, out, accumulate);
}

}  // namespace

TORCH_LIBRARY_IMPL(transformer_plugin, CPU, m) {
  m.impl("grouped_gemm_wgrad", wgrad);
  m.impl("grouped_gemm_wgrad_out", wgrad_out);
}
TORCH_LIBRARY_IMPL(transformer_plugin, Meta, m) {
  m.impl("grouped_gemm_wgrad", wgrad_meta);
  m.impl("grouped_gemm_wgrad_out", wgrad_out_meta);
}
// Not differentiable: results have no gradient.
TORCH_LIBRARY_IMPL(transformer_plugin, Autograd, m) {
  m.impl("grouped_gemm_wgrad", torch::CppFunction::makeFallthrough());
  m.impl("grouped_gemm_wgrad_out", torch::CppFunction::makeFallthrough());
}

#ifdef TRANSFORMER_PLUGIN_CUDA
TORCH_LIBRARY_IMPL(transformer_plugin, CUDA, m) {
  m.impl("grouped_gemm_wgrad", wgrad);
  m.impl("grouped_gemm_wgrad_out", wgrad_out);
}
#endif

}  // namespace transformer_plugin::gemm
