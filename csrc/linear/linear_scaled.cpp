// linear.scaled and grouped_linear.scaled: the overloads with the scales of delayed scaling.
#include "common/autograd.h"
#include "common/ops/linear.h"
#include "common/register.h"
#include "common/shared_offsets.h"
#include "common/tensor.h"
#include "gemm/ops/leading_dims.h"
#include "linear/delayed_scaling.h"
#include "linear/linear_node.h"

namespace transformer_plugin::linear {

using namespace gemm;  // layers are made of its ops and checks
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor run(const LinearCall& call) {
  check_delayed_scaling(call);
  const BelowAutograd guard;
  const Tensor x = as_matrix(call.input);
  check_delayed_memory(call, x);
  return from_matrix(linear_forward(call.with_input(x), call.formats()), call.input);
}

Tensor meta(const LinearCall& call) {
  check_delayed_scaling(call);
  return empty(call.input, with_columns(call.input, call.out_features()), call.input.scalar_type());
}

Tensor differentiable(const LinearCall& call) {
  if (!any_requires_grad(call.input, call.weight, call.bias, call.bias_scale)) return run(call);
  check_delayed_scaling(call);
  const Tensor x = as_matrix(call.input);
  check_delayed_memory(call, x);
  return from_matrix(linear_with_gradient(call.with_input(x), call.formats()), call.input);
}

template <Tensor (*run_op)(const LinearCall&)>
Tensor linear_scaled(const Tensor& input, const Tensor& weight, const Tensor& scale,
                     const OptionalTensor& amax, const OptionalTensor& bias, std::string_view input_format,
                     std::string_view weight_format, std::string_view grad_format,
                     std::string_view weight_shard) {
  const OptionalTensor scales = scale;
  const sharded::WeightShard shard = sharded::parse_weight_shard("linear", weight_shard);
  return run_op({.op = "linear",
                 .input = input,
                 .weight = weight,
                 .group_sizes = kNoTensor,
                 .bias = bias,
                 .bias_scale = kNoTensor,
                 .keys = {input_format, weight_format, grad_format},
                 .shard = shard,
                 .delayed = {scales, amax}});
}

template <Tensor (*run_op)(const LinearCall&)>
Tensor grouped_linear_scaled(const Tensor& input, const Tensor& weight, const Tensor& group_sizes,
                             const Tensor& scale, const OptionalTensor& amax, const OptionalTensor& bias,
                             const OptionalTensor& bias_scale, std::string_view input_format,
                             std::string_view weight_format, std::string_view grad_format, int64_t max_sms,
                             int64_t expected_rows, std::string_view weight_shard) {
  const OptionalTensor scales = scale, sizes = group_sizes;
  const sharded::WeightShard shard = sharded::parse_weight_shard("grouped_linear", weight_shard);
  return run_op({.op = "grouped_linear",
                 .input = input,
                 .weight = weight,
                 .group_sizes = sizes,
                 .bias = bias,
                 .bias_scale = bias_scale,
                 .keys = {input_format, weight_format, grad_format},
                 .options = {max_sms, expected_rows},
                 .shard = shard,
                 .delayed = {scales, amax}});
}

}  // namespace

TP_IMPL(linear_scaled, linear_scaled<run>, linear_scaled<meta>, linear_scaled<differentiable>);
TP_IMPL(grouped_linear_scaled, grouped_linear_scaled<run>, grouped_linear_scaled<meta>,
        grouped_linear_scaled<differentiable>);

}  // namespace transformer_plugin::linear
