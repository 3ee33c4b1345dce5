// The torch side that the norms share with the ops that quantize them: what a call is, its checks, its kernels' arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "norm/norm.h"

namespace transformer_plugin::norm {

using OptionalTensor = std::optional<at::Tensor>;
inline const OptionalTensor kNoTensor = std::nullopt;

// A call of one of the two norms: LayerNorm is centered.
struct Call {
  const char* op;
  bool centered;
  const at::Tensor& input;  // [..., cols]
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  double eps;
  bool zero_centered;
};

// A mean and a reciprocal root for each row; no mean unless centered.
struct Stats {
  at::Tensor mean, rstd;
};

// The checks of every backend.
void check_norm(const Call& call);
void check_parameter(const char* op, const char* name, const OptionalTensor& parameter,
                     const at::Tensor& input);
// Fresh, over symbolic sizes: the same for every backend.
Stats make_stats(const Call& call);

// What kernels read, contiguous, and their arguments. Statistics are written where they are given.
class Arguments {
 public:
  Arguments(const Call& call, const Stats* stats);
  const NormArgs& get() const { return args_; }

 private:
  at::Tensor input_, weight_, bias_;
  NormArgs args_;
};

}  // namespace transformer_plugin::norm
