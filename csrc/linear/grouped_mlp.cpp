// grouped_mlp: the experts of an MoE layer, in any format and with its gradient. For each group of rows:
// fc2(activation(fc1(x)) * prob). One autograd node with the same bits as the three nodes of grouped_linear, activation and
// grouped_linear; with `slot` and `source`, of permute_rows, those three and unpermute; over ranks, of dispatch, these and combine.
// grouped_mlp_out: the same into a buffer of the caller, on this rank.
#include "common/autograd.h"
#include "common/ops/linear.h"
#include "common/register.h"
#include "common/tensor.h"
#include "linear/grouped_mlp_checks.h"
#include "linear/grouped_mlp_node.h"

namespace transformer_plugin::linear {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char *kOp = "grouped_mlp", *kOutOp = "grouped_mlp_out";

// Calls the op below autograd.
Tensor redispatch(const MlpArguments& mlp, const OperandFormats& formats) {
  const BelowAutograd guard;
  const MainGrad& main_grad = mlp.fc1_main_grad;
  const auto& [out, dgrad_out] = mlp.buffers;
  const OptionalTensor slot = as_optional(mlp.rows.slot), source = as_optional(mlp.rows.source);
  if (out) {
    ops::grouped_mlp_out(mlp.input, mlp.fc1_weight, mlp.fc2_weight, mlp.group_sizes, mlp.probs, *out,
                         mlp.fc1_bias, mlp.fc2_bias, formats.input_key, formats.weight_key, formats.grad_key,
                         mlp.quantized_fc1, mlp.quantized_fc2, mlp.activation.key, mlp.options.max_sms,
                         mlp.options.expected_rows, main_grad.buffers, mlp.fc2_main_grad.buffers,
                         main_grad.accumulate, main_grad.weight_grad, main_grad.queue,
                         mlp.fc2_main_grad.queue, dgrad_out, slot, source);
    return *out;
  }
  return ops::grouped_mlp(mlp.input, mlp.fc1_weight, mlp.fc2_weight, mlp.group_sizes, mlp.probs, mlp.fc1_bias,
                          mlp.fc2_bias, formats.input_key, formats.weight_key, formats.grad_key,
                          mlp.quantized_fc1, mlp.quantized_fc2, mlp.activation.key, mlp.options.max_sms,
                          mlp.options.expected_rows, main_grad.buffers, mlp.fc2_main_grad.buffers,
                          main_grad.accumulate, main_grad.weight_grad, main_grad.queue,
                          mlp.fc2_main_grad.queue, dgrad_out, slot, source, mlp.shard.key,
                          mlp.ranks.over_ranks, mlp.ranks.group_name, mlp.ranks.timeout_ms,
                          as_optional(mlp.ranks.received), as_optional(mlp.ranks.position));
}

enum class Kernel { kCompute, kMeta, kAutograd };

template <Kernel kernel>
Tensor run(const MlpArguments& mlp, std::string_view input_format, std::string_view weight_format,
           std::string_view grad_format) {
  if constexpr (kernel == Kernel::kAutograd) {
    if (any_requires_grad(mlp.input, mlp.fc1_weight, mlp.fc2_weight, mlp.probs, mlp.fc1_bias, mlp.fc2_bias)) {
      return GroupedMlpFunction::apply(mlp.input, mlp.fc1_weight, mlp.fc2_weight, mlp.probs, mlp.fc1_bias,
                                       mlp.fc2_bias, mlp,
                                       check_grouped_mlp(mlp, input_format, weight_format, grad_format));
    }
    return redispatch(mlp, {input_format, weight_format, grad_format, {}, {}, {}});
  }
  const OperandFormats formats = check_grouped_mlp(mlp, input_format, weight_format, grad_format);
  if constexpr (kernel == Kernel::kMeta)
    return empty(mlp.input, mlp.input.sym_sizes(), mlp.input.scalar_type());
  return grouped_mlp_forward(mlp, formats);
}

template <Kernel kernel>
Tensor grouped_mlp(const Tensor& input, at::TensorList fc1_weight, at::TensorList fc2_weight,
                   const Tensor& group_sizes, const Tensor& probs, const OptionalTensor& fc1_bias,
                   const OptionalTensor& fc2_bias, std::string_view input_format,
                   std::string_view weight_format, std::string_view grad_format, OptionalList quantized_fc1,
                   OptionalList quantized_fc2, std::string_view activation, int64_t max_sms,
                   int64_t expected_rows, OptionalList fc1_main_grad, OptionalList fc2_main_grad,
                   bool accumulate, std::string_view weight_grad, const OptionalTensor& fc1_wgrad_queue,
                   const OptionalTensor& fc2_wgrad_queue, const OptionalTensor& dgrad_out,
                   const OptionalTensor& slot, const OptionalTensor& source, std::string_view weight_shard,
                   bool over_ranks, std::string_view group_name, int64_t timeout_ms,
                   const OptionalTensor& received, const OptionalTensor& position) {
  const GroupedWeight fc1(fc1_weight), fc2(fc2_weight);
  const sharded::WeightShard shard = sharded::parse_weight_shard(kOp, weight_shard);
  return run<kernel>(
      {kOp,
       input,
       fc1.get(),
       fc2.get(),
       group_sizes,
       probs,
       fc1_bias,
       fc2_bias,
       quantized_fc1,
       quantized_fc2,
       activation::parse_activation(kOp, activation),
       {max_sms, expected_rows},
       {fc1_main_grad, accumulate, weight_grad, fc1_wgrad_queue},
       {fc2_main_grad, accumulate, weight_grad, fc2_wgrad_queue},
       {std::nullopt, dgrad_out},
       {or_undefined(slot), or_undefined(source)},
       shard,
       {over_ranks, std::string(group_name), timeout_ms, or_undefined(received), or_undefined(position)}},
      input_format, weight_format, grad_format);
}

template <Kernel kernel>
void grouped_mlp_out(const Tensor& input, at::TensorList fc1_weight, at::TensorList fc2_weight,
                     const Tensor& group_sizes, const Tensor& probs, const Tensor& out,
                     const OptionalTensor& fc1_bias, const OptionalTensor& fc2_bias,
                     std::string_view input_format, std::string_view weight_format,
                     std::string_view grad_format, OptionalList quantized_fc1, OptionalList quantized_fc2,
                     std::string_view activation, int64_t max_sms, int64_t expected_rows,
                     OptionalList fc1_main_grad, OptionalList fc2_main_grad, bool accumulate,
                     std::string_view weight_grad, const OptionalTensor& fc1_wgrad_queue,
                     const OptionalTensor& fc2_wgrad_queue, const OptionalTensor& dgrad_out,
                     const OptionalTensor& slot, const OptionalTensor& source) {
  const GroupedWeight fc1(fc1_weight), fc2(fc2_weight);
  run<kernel>({kOutOp,
               input,
               fc1.get(),
               fc2.get(),
               group_sizes,
               probs,
               fc1_bias,
               fc2_bias,
               quantized_fc1,
               quantized_fc2,
               activation::parse_activation(kOutOp, activation),
               {max_sms, expected_rows},
               {fc1_main_grad, accumulate, weight_grad, fc1_wgrad_queue},
               {fc2_main_grad, accumulate, weight_grad, fc2_wgrad_queue},
               {out, dgrad_out},
               {or_undefined(slot), or_undefined(source)}},
              input_format, weight_format, grad_format);
}

}  // namespace

TP_IMPL(grouped_mlp, grouped_mlp<Kernel::kCompute>, grouped_mlp<Kernel::kMeta>,
        grouped_mlp<Kernel::kAutograd>);
TP_IMPL(grouped_mlp_out, grouped_mlp_out<Kernel::kCompute>, grouped_mlp_out<Kernel::kMeta>,
        grouped_mlp_out<Kernel::kAutograd>);

}  // namespace transformer_plugin::linear
