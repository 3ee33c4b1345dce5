// Grouped GEMM and weight gradient on the device of their operands.
#pragma once

#include "gemm/args/grouped_gemm.h"

namespace transformer_plugin::gemm {

at::Tensor run_grouped_gemm(const GroupedGemm& product, at::ScalarType dtype);
// `out` [T, N] has inner stride 1. It is written through its pointer, so its autograd version does not change.
void run_grouped_gemm_out(const GroupedGemm& product, const at::Tensor& out);
at::Tensor run_grouped_wgrad(const GroupedWgrad& product, at::ScalarType dtype);
// `out` is one stack [G, N, K], or a matrix [N, K] for each group, all with one row stride; written likewise.
void run_grouped_wgrad_out(const GroupedWgrad& product, at::TensorList out, bool accumulate);

// The stack [G, .., ..] if the matrices are its members: views of one tensor at equal distances.
std::optional<at::Tensor> as_stack(at::TensorList matrices);
std::optional<at::Tensor> as_contiguous_stack(at::TensorList matrices);

#ifdef TRANSFORMER_PLUGIN_CUDA
// Into `out`, or into a new tensor of `dtype`.
at::Tensor grouped_gemm_cuda(const GroupedGemm& problem, at::ScalarType dtype,
                             const std::optional<at::Tensor>& out = std::nullopt);
at::Tensor grouped_wgrad_cuda(const GroupedWgrad& problem, at::ScalarType dtype);
// `out` is one stack [G, N, K], or a matrix [N, K] for each group.
void grouped_wgrad_out_cuda(const GroupedWgrad& problem, at::TensorList out, bool accumulate);
#endif

}  // namespace transformer_plugin::gemm
