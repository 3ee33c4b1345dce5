// Grouped GEMM followed by SwiGLU: one kernel on a Hopper, separate steps elsewhere. The bits are the same wherever
// those of the GEMM are.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "common/format.h"
#include "gemm/dispatch/checks.h"

namespace transformer_plugin::gemm {

void check_probs(const Argument& probs, const Argument& rows);

// The checks of all ops that apply SwiGLU to a GEMM.
void check_swiglu_product(const char* op, const at::Tensor& a, const at::Tensor& b,
                          const at::Tensor& group_sizes, const std::optional<at::Tensor>& probs,
                          const std::optional<at::Tensor>& bias, int64_t interleave,
                          const std::optional<at::Tensor>& rows, const LaunchOptions& options);

struct GroupedGemmSwiglu {
  const at::Tensor& a;        // [T, K], or any rows of K
  const at::Tensor& b;        // [G, 2F, K]
  const at::Tensor& offsets;  // int32 [G + 1]
  const at::Tensor& group_sizes;
  const std::optional<at::Tensor>& probs;
  const std::optional<at::Tensor>& bias;  // [G, 2F]
  // The order of gate and linear part in the result: 0, the gate's F columns first; or 32 columns of each in turn.
  int64_t interleave;
  bool keep_input;
  const std::optional<at::Tensor>& rows;  // a[rows[i]] replaces a[i]
  LaunchOptions options;
  bool zero_tail = true;

  int64_t features() const { return b.size(1) / 2; }
  int64_t capacity() const { return rows ? rows->size(0) : a.size(0); }
};

// The format of act, quantized along rows; a format with block scales.
struct SwigluQuantize {
  const Format& format;
  std::string_view key;
  const at::Tensor& group_sizes;
};

using TwoTensors = std::tuple<at::Tensor, at::Tensor>;
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

TwoTensors run_gemm_swiglu(const GroupedGemmSwiglu& product);
// Data, scales and h.
ThreeTensors run_gemm_swiglu_quantize(const GroupedGemmSwiglu& product, const SwigluQuantize& result);

// nullopt if the Hopper kernel does not support the problem.
std::optional<TwoTensors> gemm_swiglu_cuda(const GroupedGemmSwiglu& product);
std::optional<ThreeTensors> gemm_swiglu_quantize_cuda(const GroupedGemmSwiglu& product, const Format& format);

}  // namespace transformer_plugin::gemm
