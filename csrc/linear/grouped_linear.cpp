// grouped_linear: the rows of each group times the group's weight [N, K] transposed, plus its bias, with its
// gradient, in any format. grouped_linear_out: the same into a buffer of the caller.

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/ops/linear.h"
#include "common/register.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/ops/calls.h"
#include "linear/linear_node.h"
#include "linear/main_grad.h"
#include "linear/products.h"
#include "linear/quantized_weight.h"
#include "linear/sharded_weight.h"

namespace transformer_plugin::linear {

using namespace gemm;  // layers are made of its ops and checks
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char *kOp = "grouped_linear", *kOutOp = "grouped_linear_out";

OperandFormats check_grouped_linear(const LinearCall& call) {
  const OperandFormats formats = call.formats();
  const Argument input{call.op, "input", call.input};
  const WeightArgument weight{call.op, "weight", call.weight};
  if (formats.unquantized()) {
    check_grouped_operand(input, 2);
  } else {
    check_dtype(input, kFloatTypes);
    check_dim(input, 2);
  }
  check_grouped_weight(weight, input);
  check_weight_size(weight, 2, call.input.sym_size(1), "the columns of 'input'");
  const c10::SymInt rows = call.out_features();
  check_layer_widths(input, weight, rows, formats);
  const bool has_all = weight.is_list() || call.shard.is_list;
  const c10::SymInt groups = has_all ? weight.groups() : unsharded_size(weight.first(), call.shard);
  check_groups({call.op, "group_sizes", *call.group_sizes}, input, weight.name, groups);
  if (call.bias) check_bias({call.op, "bias", *call.bias}, input, groups, rows);
  check_weight_shard(weight, call.shard, call.main_grad, call.quantized_weight.has_value());
  if (call.bias_scale) {
    check_bias_scale({call.op, "bias_scale", *call.bias_scale}, call.bias.has_value(), input);
  }
  check_launch_options(call.op, call.options);
  check_ragged_formats(call.op, formats);
  check_quantized_weight("quantized_weight", call.quantized_weight, weight, formats);
  check_weight_gradient(call.main_grad, weight, true, call.input);
  check_save_original_input(call.op, call.save_original_input, formats);
  check_caller_buffers(input, rows, call.buffers);
  call.check_memory();
  return formats;
}

Tensor grouped_linear_meta(const LinearCall& call) {
  check_grouped_linear(call);
  return empty(call.input, {call.input.sym_size(0), call.out_features()}, call.input.scalar_type());
}

Tensor unquantized_product(const LinearCall& call) {
  const Quantized input{call.input, Tensor(), Tensor()}, weight{call.weight[0], Tensor(), Tensor()};
  return product_of(call, input, weight, call.weight);
}

// Whether the call is one product, which checks its arguments itself.
bool is_one_product(const LinearCall& call) {
  return call.input.defined() && call.group_sizes->defined() && !call.weight.empty() && call.is_plain();
}

// Calls the product. What it refuses is refused by the checks of the layer, which name the layer's arguments; checking
// in every call would double the host time of checks.
Tensor checked_product(const LinearCall& call) {
  if (call.input.is_cuda()) check_earlier_sizes(call.op);
  try {
    return unquantized_product(call);
  } catch (const c10::Error&) {
    check_quantizable(call.op, call.input, call.weight[0], call.group_sizes, check_grouped_linear(call),
                      false);
    throw;
  }
}

Tensor grouped_linear(const LinearCall& call) {
  if (is_one_product(call)) {
    const BelowAutograd guard;
    return checked_product(call);
  }
  const OperandFormats formats = check_grouped_linear(call);
  check_quantizable(call.op, call.input, call.weight[0], call.group_sizes, formats, false);
  const BelowAutograd guard;
  return call.is_local_and_unquantized() ? unquantized_product(call) : linear_forward(call, formats);
}

// Calls the op below autograd.
Tensor redispatch(const LinearCall& call) {
  const BelowAutograd guard;
  const auto& [input_key, weight_key, grad_key] = call.keys;
  const auto& [max_sms, expected_rows] = call.options;
  const auto& [buffers, accumulate, weight_grad, queue] = call.main_grad;
  const auto& [out, dgrad_out] = call.buffers;
  if (out) {
    ops::grouped_linear_out(call.input, call.weight, *call.group_sizes, *out, call.bias, call.bias_scale,
                            input_key, weight_key, grad_key, call.quantized_weight, max_sms, expected_rows,
                            buffers, accumulate, weight_grad, queue, call.save_original_input, dgrad_out);
    return *out;
  }
  return ops::grouped_linear(call.input, call.weight, *call.group_sizes, call.bias, call.bias_scale,
                             input_key, weight_key, grad_key, call.quantized_weight, max_sms, expected_rows,
                             buffers, accumulate, weight_grad, queue, call.save_original_input, dgrad_out,
                             call.shard.key);
}

Tensor grouped_linear_autograd(const LinearCall& call) {
  if (!any_requires_grad(call.input, call.weight, call.bias, call.bias_scale)) return redispatch(call);
  if (is_one_product(call)) return checked_product(call);
  const OperandFormats formats = check_grouped_linear(call);
  check_quantizable(call.op, call.input, call.weight[0], call.group_sizes, formats,
                    requires_grad(call.weight));
  return linear_with_gradient(call, formats);
}

template <Tensor (*run)(const LinearCall&)>
Tensor entry_of(const Tensor& input, at::TensorList weight, const Tensor& group_sizes,
                const OptionalTensor& bias, const OptionalTensor& bias_scale, std::string_view input_format,
                std::string_view weight_format, std::string_view grad_format, OptionalList quantized_weight,
                int64_t max_sms, int64_t expected_rows, OptionalList main_grad, bool accumulate,
                std::string_view weight_grad, const OptionalTensor& wgrad_queue, bool save_original_input,
                const OptionalTensor& dgrad_out, std::string_view weight_shard) {
  const GroupedWeight given(weight);
  const OptionalTensor sizes = group_sizes;
  const sharded::WeightShard shard = sharded::parse_weight_shard(kOp, weight_shard);
  return run({kOp,
              input,
              given.get(),
              sizes,
              bias,
              bias_scale,
              {input_format, weight_format, grad_format},
              quantized_weight,
              {max_sms, expected_rows},
              {main_grad, accumulate, weight_grad, wgrad_queue},
              {std::nullopt, dgrad_out},
              save_original_input,
              {},
              shard});
}

template <Tensor (*run)(const LinearCall&)>
void out_entry_of(const Tensor& input, at::TensorList weight, const Tensor& group_sizes, const Tensor& out,
                  const OptionalTensor& bias, const OptionalTensor& bias_scale, std::string_view input_format,
                  std::string_view weight_format, std::string_view grad_format, OptionalList quantized_weight,
                  int64_t max_sms, int64_t expected_rows, OptionalList main_grad, bool accumulate,
                  std::string_view weight_grad, const OptionalTensor& wgrad_queue, bool save_original_input,
                  const OptionalTensor& dgrad_out) {
  const GroupedWeight given(weight);
  const OptionalTensor sizes = group_sizes;
  run({kOutOp,
       input,
       given.get(),
       sizes,
       bias,
       bias_scale,
       {input_format, weight_format, grad_format},
       quantized_weight,
       {max_sms, expected_rows},
       {main_grad, accumulate, weight_grad, wgrad_queue},
       {out, dgrad_out},
       save_original_input});
}

}  // namespace

TP_IMPL(grouped_linear, entry_of<grouped_linear>, entry_of<grouped_linear_meta>,
        entry_of<grouped_linear_autograd>);
TP_IMPL(grouped_linear_out, out_entry_of<grouped_linear>, out_entry_of<grouped_linear_meta>,
        out_entry_of<grouped_linear_autograd>);

}  // namespace transformer_plugin::linear
