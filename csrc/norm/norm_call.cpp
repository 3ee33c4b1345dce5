// Checks and kernel arguments of the norms (norm/norm_call.h).
#include "norm/norm_call.h"

#include "common/check.h"
#include "common/tensor.h"

namespace transformer_plugin::norm {
namespace {

using at::Tensor;

const void* data_of(const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }

float* floats_of(const Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr;
}

Tensor contiguous(const OptionalTensor& tensor) { return tensor ? tensor->contiguous() : Tensor(); }

}  // namespace

void check_parameter(const char* op, const char* name, const OptionalTensor& parameter, const Tensor& input) {
  if (!parameter) return;
  const Argument argument{op, name, *parameter};
  check_same_dtype(argument, {op, "input", input});
  check_same_device(argument, {op, "input", input});
  check_dim(argument, 1);
  check_size(argument, 0, input.sym_size(-1), "the last dimension of 'input'");
}

void check_norm(const NormCall& call, const char* weight, const char* bias) {
  check_dtype({call.op, "input", call.input}, kFloatTypes);
  TP_CHECK_VALUE(call.input.dim() >= 1 && call.input.sym_size(-1) >= 1, call.op, "input",
                 "a last dimension of at least 1", describe(call.input),
                 "There is nothing to normalise in an empty row");
  check_parameter(call.op, weight, call.weight, call.input);
  check_parameter(call.op, bias, call.bias, call.input);
  TP_CHECK_VALUE(call.eps >= 0.0, call.op, "eps", "a number that is not negative", call.eps,
                 "Pass a small one, for example 1e-5");
}

Stats make_stats(const NormCall& call) {
  const auto sizes = call.input.sym_sizes();
  const c10::SymIntArrayRef rows = sizes.slice(0, sizes.size() - 1);
  Stats stats;
  if (call.centered) stats.mean = empty(call.input, rows, at::kFloat);
  stats.rstd = empty(call.input, rows, at::kFloat);
  return stats;
}

NormArgsOwner::NormArgsOwner(const NormCall& call, const Stats* stats)
    : input_(call.input.contiguous()), weight_(contiguous(call.weight)), bias_(contiguous(call.bias)) {
  const int64_t cols = input_.size(-1);
  args_ = {input_.const_data_ptr(),
           data_of(weight_),
           data_of(bias_),
           stats ? floats_of(stats->mean) : nullptr,
           stats ? floats_of(stats->rstd) : nullptr,
           input_.numel() / cols,
           cols,
           static_cast<float>(call.eps),
           call.centered,
           call.zero_centered,
           to_dtype(input_.scalar_type())};
}

}  // namespace transformer_plugin::norm
