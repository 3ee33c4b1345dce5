// Shared by the norms and the ops that quantize their results: the call, its checks, and the kernel
// arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "norm/norm.h"

namespace transformer_plugin::norm {

using OptionalTensor = std::optional<at::Tensor>;
inline const OptionalTensor kNoTensor = std::nullopt;

// A call of one of the two norms: LayerNorm is centered.
struct NormCall {
  const char* op;
  bool centered;
  const at::Tensor& input;  // [..., cols]
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  double eps;
  bool zero_centered;
};

// The mean and the reciprocal standard deviation of each row; no mean for RMSNorm.
struct Stats {
  at::Tensor mean, rstd;
};

// The checks of every backend, with the names of the op's arguments for weight and bias.
void check_norm(const NormCall& call, const char* weight = "weight", const char* bias = "bias");
void check_parameter(const char* op, const char* name, const OptionalTensor& parameter,
                     const at::Tensor& input);
// New tensors; sizes may be symbolic.
Stats make_stats(const NormCall& call);

// The kernel arguments, and the contiguous tensors that they point to. Statistics are written if `stats` is
// not null.
class NormArgsOwner {
 public:
  NormArgsOwner(const NormCall& call, const Stats* stats);
  const NormArgs& get() const { return args_; }

 private:
  at::Tensor input_, weight_, bias_;
  NormArgs args_;
};

}  // namespace transformer_plugin::norm
