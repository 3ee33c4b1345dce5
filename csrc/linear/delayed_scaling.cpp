#include "linear/delayed_scaling.h"

#include <ATen/ops/mul.h>

#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/select.h"
#include "linear/nonfinite.h"
#include "linear/sharded_weight.h"
#include "quantize/ops/calls.h"
#include "quantize/ops/checks.h"
#include "quantize/ops/scaled.h"

namespace transformer_plugin::linear {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

namespace {

void check_shard(const LinearCall& call) {
  const sharded::WeightShard& shard = call.shard;
  if (!shard.is_sharded()) return;
  TP_CHECK_VALUE(!shard.is_list && !shard.is_external(), call.op, "weight_shard",
                 "a key without 'list' and 'handle'", "'" << shard.key << "'",
                 "Leave out the scales: linear and grouped_linear then compute them from the data");
  check_weight_shard({call.op, "weight", call.weight}, shard, {});
}

// The largest magnitudes of plain operands are written before the product would refuse a subclass among the others.
void check_plain_beside_amax(const LinearCall& call) {
  const OptionalTensor& amax = call.delayed.amax;
  if (!amax || is_traced(*amax)) return;
  const auto check = [&](const char* name, const OptionalTensor& tensor) {
    TP_CHECK_VALUE(!tensor || !is_traced(*tensor), call.op, name, "a plain tensor, as 'amax' is",
                   "a subclass " << describe(*tensor), "Pass the plain tensor that it has");
  };
  check("input", call.input);
  check("weight", call.weight[0]);
  check("group_sizes", call.group_sizes);
  check("bias", call.bias);
  check("bias_scale", call.bias_scale);
  check("scale", call.delayed.scale);
}

}  // namespace

void check_delayed_scaling(const LinearCall& call) {
  check_plain_beside_amax(call);
  const Tensor& weight_tensor = call.weight[0];
  const Argument input{call.op, "input", call.input}, weight{call.op, "weight", weight_tensor};
  const bool grouped = call.group_sizes.has_value();
  check_dtype(input, kFloatTypes);
  if (grouped) {
    check_dim(input, 2);
  } else {
    TP_CHECK_VALUE(call.input.dim() > 0, call.op, "input", "at least 1 dimension", describe(call.input),
                   "Reshape it first");
  }
  gemm::check_pair(weight, input, grouped ? 3 : 2);
  check_size(weight, grouped ? 2 : 1, call.input.sym_size(-1), "the last dimension of 'input'");
  check_shard(call);
  const c10::SymInt size = unsharded_size(weight_tensor, call.shard);
  const std::optional<c10::SymInt> groups = grouped ? std::optional<c10::SymInt>(size) : std::nullopt;
  if (grouped) gemm::check_groups({call.op, "group_sizes", *call.group_sizes}, input, "weight", size);
  if (call.bias) gemm::check_bias({call.op, "bias", *call.bias}, input, groups, call.out_features());
  if (call.bias_scale) {
    gemm::check_bias_scale({call.op, "bias_scale", *call.bias_scale}, call.bias.has_value(), input);
  }
  const c10::SymInt count = groups ? *groups * 3 : c10::SymInt(3);
  const auto check_state = [&](const char* name, const Tensor& state) {
    const Argument argument{call.op, name, state};
    quantize::check_scale_run(argument, input, 0, count);
    check_size(argument, 0, count, "those of input, weight and gradient, one for each group");
  };
  check_state("scale", *call.delayed.scale);
  if (call.delayed.amax) {
    check_state("amax", *call.delayed.amax);
    check_written({call.op, "amax", *call.delayed.amax});
  }
  gemm::check_launch_options(call.op, call.options);
  quantize::delayed_scaling_format(call.op, "input_format", call.keys.input);
  quantize::delayed_scaling_format(call.op, "weight_format", call.keys.weight);
  quantize::delayed_scaling_format(call.op, "grad_format", call.keys.grad);
}

void check_delayed_memory(const LinearCall& call, const Tensor& rows) {
  check_quantizable(call.op, rows, call.weight[0], call.group_sizes, call.formats(), false);
  const OptionalTensor& amax = call.delayed.amax;
  if (!amax || !has_memory(*amax) || !has_memory(call.input)) return;
  check_apart(call.op, {{"amax", amax}},
              {{"input", call.input},
               {"weight", call.weight[0]},
               {"group_sizes", call.group_sizes},
               {"scale", call.delayed.scale},
               {"bias", call.bias},
               {"bias_scale", call.bias_scale}});
}

Quantized quantize_delayed(const Tensor& x, const OptionalTensor& group_sizes, const DelayedScales& scales,
                           const OperandFormats& formats, ScaleRole role) {
  struct {
    std::string_view key;
    const Format& format;
  } const of_role[] = {{formats.input_key, formats.input},
                       {formats.weight_key, formats.weight},
                       {formats.grad_key, formats.grad}};
  const auto& [key, format] = of_role[static_cast<int>(role)];
  const bool recomputes = role != ScaleRole::kGradient && quantize::runs_in_backward();
  const OptionalTensor amax = recomputes ? std::nullopt : scales.amax;
  const int64_t first = static_cast<int64_t>(role) * (scales.scale->size(0) / 3);
  quantize::Outputs rounded =
      quantize::call_quantize_scaled(x, *scales.scale, key, amax, group_sizes, first, {true, false});
  Quantized result{std::move(rounded.data), std::move(rounded.scale), Tensor(), format, key};
  if (marks_nonfinite(key)) result.scale = at::mul(result.scale, nonfinite_factor(x, group_sizes));
  return result;
}

Quantized transposed_operand(const Quantized& rowwise, const OptionalTensor& group_sizes) {
  const auto& [data, scale, amax, format, key, transposed, row_index] = rowwise;
  if (!gemm::has_quantized_kernels(data)) return {data.t(), scale, Tensor(), format, key, true};
  Quantized result{Tensor(), Tensor(), Tensor(), format, key, true};
  std::tie(result.data, result.scale) =
      quantize::call_requantize_transposed(data, scale, key, at::kFloat, group_sizes);
  return result;
}

Tensor untracked_amax(const Tensor& amax) { return is_traced(amax) ? amax : amax.variable_data(); }

}  // namespace transformer_plugin::linear
