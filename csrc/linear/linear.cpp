// linear: input [..., K] times weight [N, K] transposed, plus bias [N], with its gradient, in any format. linear_out: the
// same into a buffer of the caller.
#include "common/ops/linear.h"

#include "common/autograd.h"
#include "common/ops/gemm.h"
#include "common/register.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/generic/dense_gemm.h"
#include "gemm/ops/calls.h"
#include "gemm/ops/leading_dims.h"
#include "linear/calls.h"
#include "linear/input_rows.h"
#include "linear/main_grad.h"
#include "linear/quantized_linear.h"
#include "linear/quantized_weight.h"
#include "linear/sharded_weight.h"
#include "linear/wgrad_destination.h"

namespace transformer_plugin::linear {

using namespace gemm;  // layers are made of its ops and checks
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char *kOp = "linear", *kOutOp = "linear_out";
const OptionalTensor kNoTensor = std::nullopt;

// The arguments of a call.
struct Call {
  const char* op;
  const Tensor &input, &weight;
  const OptionalTensor& bias;
  std::string_view input_format, weight_format, grad_format;
  OptionalList quantized_weight;
  MainGrad main_grad;
  CallerBuffers buffers;
  bool save_original_input;
  InputRanks input_ranks = {};
  const sharded::WeightShard& shard = sharded::kUnsharded;

  OperandFormats formats() const { return operand_formats(op, input_format, weight_format, grad_format); }
  LinearArguments layer(const Tensor& rows) const {
    return {rows,      weight,  kNoTensor,           bias,        kNoTensor, quantized_weight, {},
            main_grad, buffers, save_original_input, input_ranks, shard};
  }
  // [M, N] in the leading dimensions of the input, of all its ranks.
  Tensor shaped(const Tensor& output) const {
    if (!input_ranks.is_sharded()) return from_matrix(output, input);
    return output.view_symint(output_sizes());
  }
  std::vector<c10::SymInt> output_sizes() const {
    std::vector<c10::SymInt> sizes(input.sym_sizes().begin(), input.sym_sizes().end());
    sizes.back() = out_features();
    sizes[0] = sizes[0] * input_ranks.ranks;
    return sizes;
  }
  c10::SymInt out_features() const { return unsharded_size(weight, shard); }
};

OperandFormats check_linear(const Call& call) {
  const OperandFormats formats = call.formats();
  const Argument input{call.op, "input", call.input}, weight{call.op, "weight", call.weight};
  const WeightArgument weights{call.op, "weight", call.weight};
  check_dtype(input, formats.native() ? kGemmTypes : kFloatTypes);
  TP_CHECK_VALUE(call.input.dim() > 0, call.op, "input", "at least 1 dimension", describe(call.input),
                 "Reshape it first");
  check_pair(weight, input, 2);
  check_size(weight, 1, call.input.sym_size(-1), "the last dimension of 'input'");
  check_layer_widths(input, weights, call.out_features(), formats);
  if (call.bias) check_bias({call.op, "bias", *call.bias}, input, std::nullopt, call.out_features());
  check_weight_shard(weights, call.shard, call.main_grad);
  check_quantized_weight("quantized_weight", call.quantized_weight, weights, formats);
  const MainGrad& main_grad = call.main_grad;
  check_weight_gradient(main_grad, weights, false, call.input);
  check_save_original_input(call.op, call.save_original_input, formats);
  check_caller_buffers(input, call.out_features(), call.buffers);
  check_input_ranks(input, call.input_ranks, call.buffers);
  if (!main_grad.buffers && !call.buffers.given()) return formats;
  CallMemory memory(call.op);
  memory.written("main_grad", main_grad.buffers);
  call.buffers.add_to(memory);
  memory.read("input", call.input);
  memory.read("weight", call.weight);
  memory.read("bias", call.bias);
  memory.read("quantized_weight", call.quantized_weight);
  memory.check();
  return formats;
}

Tensor linear_meta(const Call& call) {
  check_linear(call);
  return empty(call.input, call.output_sizes(), call.input.scalar_type());
}

// The product of unquantized operands, [..., N], in the buffer if there is one.
Tensor native_product(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& out) {
  const Tensor x = as_matrix(input), w = transposed_view(weight);
  if (!out) return from_matrix(dense_gemm(x, w, bias, x.scalar_type()), input);
  dense_gemm_out(x, w, bias, std::nullopt, std::nullopt, as_matrix(*out));
  mark_written(*out);
  return *out;
}

Tensor linear(const Call& call) {
  const OperandFormats formats = check_linear(call);
  const BelowAutograd guard;
  const bool is_plain = formats.native() && !call.shard.is_sharded() && !call.input_ranks.is_sharded();
  if (is_plain) return native_product(call.input, call.weight, call.bias, call.buffers.out);
  const Tensor x = as_matrix(call.input);
  const LinearArguments layer = call.layer(x);
  check_quantizable(call.op, layer, formats, false);
  const Tensor output = quantized_linear_forward(layer, formats);
  return call.buffers.out ? output : call.shaped(output);
}

// Calls the op below autograd.
Tensor redispatch(const Call& call) {
  const BelowAutograd guard;
  const OptionalList& list = call.main_grad.buffers;
  const OptionalTensor main_grad = list ? OptionalTensor((*list)[0]) : std::nullopt;
  const auto& [out, dgrad_out] = call.buffers;
  if (out) {
    ops::linear_out(call.input, call.weight, *out, call.bias, call.input_format, call.weight_format,
                    call.grad_format, call.quantized_weight, main_grad, call.main_grad.accumulate,
                    call.main_grad.weight_grad, call.main_grad.queue, call.save_original_input, dgrad_out);
    return *out;
  }
  return ops::linear(call.input, call.weight, call.bias, call.input_format, call.weight_format,
                     call.grad_format, call.quantized_weight, main_grad, call.main_grad.accumulate,
                     call.main_grad.weight_grad, call.main_grad.queue, call.save_original_input, dgrad_out,
                     call.shard.key, call.input_ranks.ranks, call.input_ranks.group);
}

Tensor plain_forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                     const OptionalTensor& out = std::nullopt) {
  return redispatch({kOp, input, weight, bias, "none", "none", "none", std::nullopt, {}, {out}, false});
}

// a @ b, with the bits that every layer has: a sharded or tensor-parallel one calls this op, too.
Tensor product_of(const Tensor& a, const Tensor& b) {
  return call_gemm(a, b, kNoTensor, /*transpose_b=*/false, a.scalar_type());
}

// Without quantization. Two nodes, with and without a bias, so that only tensors are saved.
template <bool has_bias>
class LinearFunction : public DifferentiableTwice<LinearFunction<has_bias>> {
 public:
  static constexpr const char* kName = "linear";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias) {
    ctx->save_for_backward(
        {weight.requires_grad() ? input : Tensor(), input.requires_grad() ? weight : Tensor()});
    return plain_forward(input, weight, bias);
  }

  // The bias's gradient is float32; the autograd engine casts it to the bias's dtype.
  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor grad = as_matrix(grads[0]);
    Tensor grad_input, grad_weight, grad_bias;
    if (ctx->needs_input_grad(0)) grad_input = from_matrix(product_of(grad, saved[1]), grads[0]);
    if (ctx->needs_input_grad(1)) grad_weight = product_of(grad.t(), as_matrix(saved[0]));
    if constexpr (has_bias) {
      if (ctx->needs_input_grad(2)) grad_bias = ops::bias_backward(grad);
    }
    return {grad_input, grad_weight, grad_bias};
  }
};

// The same with a main_grad, a queue or buffers of the caller. All gradients have the bits of those above.
template <bool has_bias>
class LinearMainGradFunction : public DifferentiableOnce<LinearMainGradFunction<has_bias>> {
 public:
  static constexpr const char* kName = "linear";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias, const MainGrad& main_grad, const CallerBuffers& buffers) {
    const bool wants_weight = weight.requires_grad(), wants_input = input.requires_grad();
    ctx->save_for_backward({wants_weight ? input : Tensor(), wants_input ? weight : Tensor()});
    if (wants_weight) save_wgrad_destination(ctx, "main_grad", main_grad, weight, sharded::kUnsharded);
    if (wants_input) save_dgrad_out(ctx, buffers);
    return plain_forward(input, weight, bias, buffers.out);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor grad = as_matrix(grads[0]);
    Tensor grad_input, grad_weight, grad_bias;
    if (ctx->needs_input_grad(0)) {
      const OptionalTensor into = saved_dgrad_out(ctx, kOp, grad);
      if (into) {
        call_gemm_out(grad, saved[1], as_matrix(*into), /*transpose_b=*/false, /*accumulate=*/false);
        mark_written(*into);
      }
      grad_input = into ? *into : from_matrix(product_of(grad, saved[1]), grads[0]);
    }
    const auto destination =
        wgrad_destination({ctx, 1, 1, /*is_grouped=*/false}, "main_grad", sharded::kUnsharded);
    if (destination) {
      const Quantized g{grad, Tensor(), Tensor()}, x{as_matrix(saved[0]), Tensor(), Tensor()};
      grad_weight = destination->compute({g, x, std::nullopt, grad.scalar_type()})[0];
    }
    if constexpr (has_bias) {
      if (ctx->needs_input_grad(2)) grad_bias = ops::bias_backward(grad);
    }
    return {grad_input, grad_weight, grad_bias, Tensor(), Tensor()};
  }
};

Tensor linear_autograd(const Call& call) {
  const auto& [op, input, weight, bias, input_format, weight_format, grad_format, quantized, main_grad,
               buffers, save_original_input, input_ranks, shard] = call;
  if (!any_wants_grad(input, weight, bias)) return redispatch(call);
  const bool is_native = input_format == "none" && weight_format == "none" && grad_format == "none";
  const bool is_sharded = shard.is_sharded() || input_ranks.is_sharded();
  const bool is_plain =
      is_native && !is_sharded && !quantized && main_grad.accumulate && main_grad.weight_grad == "none";
  if (is_plain && !main_grad.buffers && !main_grad.queue && !buffers.given()) {
    return bias ? LinearFunction<true>::apply(input, weight, bias)
                : LinearFunction<false>::apply(input, weight, bias);
  }
  const OperandFormats formats = check_linear(call);
  if (formats.native() && !is_sharded) {
    return bias ? LinearMainGradFunction<true>::apply(input, weight, bias, main_grad, buffers)
                : LinearMainGradFunction<false>::apply(input, weight, bias, main_grad, buffers);
  }
  const bool into_buffer =
      buffers.dgrad_out && input.dim() != 2 && input.requires_grad() && !is_traced(input);
  const Tensor x = into_buffer ? rows_into(input, *buffers.dgrad_out) : as_matrix(input);
  const LinearArguments layer = call.layer(x);
  check_quantizable(op, layer, formats, weight.requires_grad());
  const Tensor output = quantized_linear_autograd(layer, formats);
  return buffers.out ? output : call.shaped(output);
}

template <Tensor (*run)(const Call&)>
Tensor entry_of(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                std::string_view input_format, std::string_view weight_format, std::string_view grad_format,
                OptionalList quantized_weight, const OptionalTensor& main_grad, bool accumulate,
                std::string_view weight_grad, const OptionalTensor& wgrad_queue, bool save_original_input,
                const OptionalTensor& dgrad_out, std::string_view weight_shard, int64_t input_ranks,
                std::string_view input_group) {
  const OptionalList buffers = main_grad ? OptionalList(at::TensorList(*main_grad)) : std::nullopt;
  const sharded::WeightShard shard = sharded::parse_weight_shard(kOp, weight_shard);
  return run({kOp,
              input,
              weight,
              bias,
              input_format,
              weight_format,
              grad_format,
              quantized_weight,
              {buffers, accumulate, weight_grad, wgrad_queue},
              {std::nullopt, dgrad_out},
              save_original_input,
              {input_ranks, input_group},
              shard});
}

template <Tensor (*run)(const Call&)>
void out_entry_of(const Tensor& input, const Tensor& weight, const Tensor& out, const OptionalTensor& bias,
                  std::string_view input_format, std::string_view weight_format, std::string_view grad_format,
                  OptionalList quantized_weight, const OptionalTensor& main_grad, bool accumulate,
                  std::string_view weight_grad, const OptionalTensor& wgrad_queue, bool save_original_input,
                  const OptionalTensor& dgrad_out) {
  const OptionalList buffers = main_grad ? OptionalList(at::TensorList(*main_grad)) : std::nullopt;
  run({kOutOp,
       input,
       weight,
       bias,
       input_format,
       weight_format,
       grad_format,
       quantized_weight,
       {buffers, accumulate, weight_grad, wgrad_queue},
       {out, dgrad_out},
       save_original_input});
}

}  // namespace

TP_IMPL(linear, entry_of<linear>, entry_of<linear_meta>, entry_of<linear_autograd>);
TP_IMPL(linear_out, out_entry_of<linear>, out_entry_of<linear_meta>, out_entry_of<linear_autograd>);

}  // namespace transformer_plugin::linear
