// linear: input [..., K] times weight [N, K] transposed, plus bias [N], with its gradient, in any format. linear_out: the
// same into a buffer of the caller.
#include "common/ops/linear.h"

#include "common/autograd.h"
#include "common/register.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/generic/dense_gemm.h"
#include "gemm/ops/leading_dims.h"
#include "linear/linear_node.h"
#include "linear/main_grad.h"
#include "linear/quantized_weight.h"
#include "linear/sequence_parallel_input.h"
#include "linear/sharded_weight.h"

namespace transformer_plugin::linear {

using namespace gemm;  // layers are made of its ops and checks
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr const char *kOp = "linear", *kOutOp = "linear_out";

// The output is [M, N] in the leading dimensions of the input, of all its ranks.
std::vector<c10::SymInt> output_sizes(const LinearCall& call) {
  std::vector<c10::SymInt> sizes(call.input.sym_sizes().begin(), call.input.sym_sizes().end());
  sizes.back() = call.out_features();
  sizes[0] = sizes[0] * call.sequence_parallel.size;
  return sizes;
}

Tensor shaped(const Tensor& output, const LinearCall& call) {
  if (call.buffers.out) return output;
  return call.sequence_parallel.is_sharded() ? output.view_symint(output_sizes(call))
                                             : from_matrix(output, call.input);
}

OperandFormats check_linear(const LinearCall& call) {
  const OperandFormats formats = call.formats();
  const Argument input{call.op, "input", call.input}, weight{call.op, "weight", call.weight[0]};
  const WeightArgument weights{call.op, "weight", call.weight};
  check_dtype(input, formats.unquantized() ? kGemmTypes : kFloatTypes);
  TP_CHECK_VALUE(call.input.dim() > 0, call.op, "input", "at least 1 dimension", describe(call.input),
                 "Reshape it first");
  check_pair(weight, input, 2);
  check_size(weight, 1, call.input.sym_size(-1), "the last dimension of 'input'");
  check_layer_widths(input, weights, call.out_features(), formats);
  if (call.bias) check_bias({call.op, "bias", *call.bias}, input, std::nullopt, call.out_features());
  check_weight_shard(weights, call.shard, call.main_grad);
  check_quantized_weight("quantized_weight", call.quantized_weight, weights, formats);
  check_weight_gradient(call.main_grad, weights, false, call.input);
  check_save_original_input(call.op, call.save_original_input, formats);
  check_caller_buffers(input, call.out_features(), call.buffers);
  check_sequence_parallel(input, call.sequence_parallel, call.buffers);
  call.check_memory();
  return formats;
}

Tensor linear_meta(const LinearCall& call) {
  check_linear(call);
  return empty(call.input, output_sizes(call), call.input.scalar_type());
}

// The product of unquantized operands, [..., N], in the buffer if there is one.
Tensor unquantized_product(const LinearCall& call) {
  const Tensor x = as_matrix(call.input), w = transposed_view(call.weight[0]);
  const OptionalTensor& out = call.buffers.out;
  if (!out) return from_matrix(dense_gemm(x, w, call.bias, x.scalar_type()), call.input);
  dense_gemm_out(x, w, call.bias, std::nullopt, std::nullopt, as_matrix(*out));
  mark_written(*out);
  return *out;
}

Tensor linear(const LinearCall& call) {
  const OperandFormats formats = check_linear(call);
  const BelowAutograd guard;
  if (call.is_local_and_unquantized()) return unquantized_product(call);
  const Tensor x = as_matrix(call.input);
  check_quantizable(call.op, x, call.weight[0], call.group_sizes, formats, false);
  return shaped(linear_forward(call.with_input(x), formats), call);
}

// Calls the op below autograd.
Tensor redispatch(const LinearCall& call) {
  const BelowAutograd guard;
  const auto& [input_key, weight_key, grad_key] = call.keys;
  const auto& [list, accumulate, weight_grad, queue] = call.main_grad;
  const OptionalTensor main_grad = list ? OptionalTensor((*list)[0]) : std::nullopt;
  const auto& [out, dgrad_out] = call.buffers;
  if (out) {
    ops::linear_out(call.input, call.weight[0], *out, call.bias, input_key, weight_key, grad_key,
                    call.quantized_weight, main_grad, accumulate, weight_grad, queue,
                    call.save_original_input, dgrad_out);
    return *out;
  }
  return ops::linear(call.input, call.weight[0], call.bias, input_key, weight_key, grad_key,
                     call.quantized_weight, main_grad, accumulate, weight_grad, queue,
                     call.save_original_input, dgrad_out, call.shard.key, call.sequence_parallel.size,
                     call.sequence_parallel.group);
}

Tensor linear_autograd(const LinearCall& call) {
  if (!any_requires_grad(call.input, call.weight, call.bias)) return redispatch(call);
  // The op below autograd checks a plain call.
  if (call.is_plain()) {
    if (!call.weight[0].defined()) refuse_none(call.op, 1);
    return linear_with_gradient(call, {});
  }
  const OperandFormats formats = check_linear(call);
  if (call.is_local_and_unquantized()) return linear_with_gradient(call, formats);
  const OptionalTensor& dgrad_out = call.buffers.dgrad_out;
  const bool into_buffer =
      dgrad_out && call.input.dim() != 2 && call.input.requires_grad() && !is_traced(call.input);
  const Tensor x = into_buffer ? rows_into(call.input, *dgrad_out) : as_matrix(call.input);
  check_quantizable(call.op, x, call.weight[0], call.group_sizes, formats, call.weight[0].requires_grad());
  return shaped(linear_with_gradient(call.with_input(x), formats), call);
}

template <Tensor (*run)(const LinearCall&)>
Tensor entry_of(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                std::string_view input_format, std::string_view weight_format, std::string_view grad_format,
                OptionalList quantized_weight, const OptionalTensor& main_grad, bool accumulate,
                std::string_view weight_grad, const OptionalTensor& wgrad_queue, bool save_original_input,
                const OptionalTensor& dgrad_out, std::string_view weight_shard,
                int64_t sequence_parallel_size, std::string_view sequence_parallel_group) {
  const OptionalList buffers = main_grad ? OptionalList(at::TensorList(*main_grad)) : std::nullopt;
  const sharded::WeightShard shard = sharded::parse_weight_shard(kOp, weight_shard);
  return run({kOp,
              input,
              weight,
              kNoTensor,
              bias,
              kNoTensor,
              {input_format, weight_format, grad_format},
              quantized_weight,
              {},
              {buffers, accumulate, weight_grad, wgrad_queue},
              {std::nullopt, dgrad_out},
              save_original_input,
              {sequence_parallel_size, sequence_parallel_group},
              shard});
}

template <Tensor (*run)(const LinearCall&)>
void out_entry_of(const Tensor& input, const Tensor& weight, const Tensor& out, const OptionalTensor& bias,
                  std::string_view input_format, std::string_view weight_format, std::string_view grad_format,
                  OptionalList quantized_weight, const OptionalTensor& main_grad, bool accumulate,
                  std::string_view weight_grad, const OptionalTensor& wgrad_queue, bool save_original_input,
                  const OptionalTensor& dgrad_out) {
  const OptionalList buffers = main_grad ? OptionalList(at::TensorList(*main_grad)) : std::nullopt;
  run({kOutOp,
       input,
       weight,
       kNoTensor,
       bias,
       kNoTensor,
       {input_format, weight_format, grad_format},
       quantized_weight,
       {},
       {buffers, accumulate, weight_grad, wgrad_queue},
       {out, dgrad_out},
       save_original_input});
}

}  // namespace

TP_IMPL(linear, entry_of<linear>, entry_of<linear_meta>, entry_of<linear_autograd>);
TP_IMPL(linear_out, out_entry_of<linear>, out_entry_of<linear_meta>, out_entry_of<linear_autograd>);

}  // namespace transformer_plugin::linear
