// Grouped GEMM followed by SwiGLU: one kernel on a Hopper, separate steps elsewhere. The bits are the same
// wherever those of the GEMM are.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "common/format.h"
#include "gemm/args/gemm_problem.h"
#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/select.h"

namespace transformer_plugin::gemm {

void check_probs(const Argument& probs, const Argument& rows);

// The checks of all ops that apply SwiGLU to a GEMM.
void check_swiglu_product(const char* op, const at::Tensor& a, const at::Tensor& b,
                          const at::Tensor& group_sizes, const std::optional<at::Tensor>& probs,
                          const std::optional<at::Tensor>& bias, int64_t interleave,
                          const std::optional<at::Tensor>& rows, const LaunchOptions& options);

// act = swiglu(h) * probs with the product h [T, 2F] of kFprop, of plain operands.
struct GroupedGemmSwiglu {
  GemmProblem problem;
  const std::optional<at::Tensor>& probs;
  // The order of gate and linear part in h: 0, the gate's F columns first; or 32 columns of each in turn.
  int64_t interleave;
  bool keep_input;

  int64_t features() const { return problem.columns() / 2; }
  int64_t capacity() const { return problem.rows(); }
};

// The format of act, quantized along rows; a format with block scales.
struct SwigluQuantize {
  const Format& format;
  std::string_view key;
};

using TwoTensors = std::tuple<at::Tensor, at::Tensor>;
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

TwoTensors run_gemm_swiglu(const GroupedGemmSwiglu& product);
// Data, scales and h.
ThreeTensors run_gemm_swiglu_quantize(const GroupedGemmSwiglu& product, const SwigluQuantize& result);

#ifdef TRANSFORMER_PLUGIN_CUDA
// By the kernels with SwiGLU in the epilogue, where they are selected.
TwoTensors gemm_swiglu_cuda(const GroupedGemmSwiglu& product, const GemmDesc& desc,
                            const Selection& selection);
ThreeTensors gemm_swiglu_quantize_cuda(const GroupedGemmSwiglu& product, const GemmDesc& desc,
                                       const Selection& selection, const Format& format);
#endif

}  // namespace transformer_plugin::gemm
