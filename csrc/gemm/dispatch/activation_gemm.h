// Grouped GEMM followed by an activation: one kernel on a Hopper, separate steps elsewhere. The bits are the same
// wherever those of the GEMM are.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "activation/description.h"
#include "common/format.h"
#include "gemm/args/gemm_problem.h"
#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/select.h"

namespace transformer_plugin::gemm {

// The checks of all ops that apply an activation, of this key, to a GEMM.
activation::NamedActivation check_activation_product(
    const Argument& a, const at::Tensor& b, const at::Tensor& group_sizes,
    const std::optional<at::Tensor>& probs, const std::optional<at::Tensor>& bias,
    std::string_view activation, const std::optional<at::Tensor>& rows, const LaunchOptions& options);

// act = activation(h) * probs with the product h of kFprop, [T, 2F], or [T, F] without a gate; of plain operands.
struct GroupedGemmActivation {
  GemmProblem problem;
  const std::optional<at::Tensor>& probs;
  activation::NamedActivation activation;
  bool keep_input;

  int64_t features() const { return problem.columns() / activation.columns_per_feature(); }
  int64_t capacity() const { return problem.rows(); }
};

using TwoTensors = std::tuple<at::Tensor, at::Tensor>;
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// The product and the activation one after the other, with the bits of the kernels.
TwoTensors gemm_activation_steps(const GroupedGemmActivation& product);
// Data, scales and h.
// `format`: of act, quantized along rows; with block scales.
ThreeTensors gemm_activation_quantize_steps(const GroupedGemmActivation& product, std::string_view format);

#ifdef TRANSFORMER_PLUGIN_CUDA
// What is launched in one kernel.
struct EpilogueKernel {
  GemmDesc desc;
  Selection selection;
};
// None where select_gemm takes the steps.
std::optional<EpilogueKernel> epilogue_kernel(const GroupedGemmActivation& product);
TwoTensors gemm_activation_cuda(const GroupedGemmActivation& product, const EpilogueKernel& kernel);
ThreeTensors gemm_activation_quantize_cuda(const GroupedGemmActivation& product, const EpilogueKernel& kernel,
                                           const Format& format);
#endif

}  // namespace transformer_plugin::gemm
