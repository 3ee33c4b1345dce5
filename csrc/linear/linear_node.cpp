#include "linear/linear_node.h"

#include <array>
#include <string>
#include <tuple>
#include <utility>

#include "common/autograd.h"
#include "common/ops/gemm.h"
#include "common/ops/linear.h"
#include "common/shared_offsets.h"
#include "gemm/dispatch/select.h"
#include "gemm/ops/calls.h"
#include "gemm/ops/leading_dims.h"
#include "linear/delayed_scaling.h"
#include "linear/products.h"
#include "linear/sequence_parallel_input.h"
#include "linear/sharded_weight.h"
#include "linear/weight_source.h"
#include "linear/wgrad_destination.h"

namespace transformer_plugin::linear {

using namespace gemm;  // layers are made of its ops and checks
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Names of what a node saves.
constexpr const char *kMainGrad = "main_grad", *kHasBias = "has_bias", *kIsGrouped = "is_grouped";

// The operand of the input; columnwise for the weight gradient.
QuantizedOperand input_operand(const LinearCall& call, const OperandFormats& formats,
                               const OptionalTensor& sizes, bool columnwise) {
  const Format& format = formats.input;
  const std::string_view key = formats.input_key;
  if (call.delayed.scale)
    return {quantize_delayed(call.input, sizes, call.delayed, formats, ScaleRole::kInput), {}};
  if (!call.sequence_parallel.is_sharded())
    return quantize_operand(call.input, sizes, format, key, true, columnwise);
  return all_gather_operand(call.input, call.sequence_parallel, sizes, format, key, true, columnwise);
}

// `backward`: also what the backward needs.
QuantizedWeight weight_operand(const LinearCall& call, const OperandFormats& formats, bool backward) {
  const WeightSource source{call.weight, call.quantized_weight, call.shard};
  if (!call.delayed.scale) return source.for_forward(formats, backward);
  const Quantized weight =
      quantize_delayed(source.values(false), std::nullopt, call.delayed, formats, ScaleRole::kWeight);
  // A sharded weight is gathered again.
  return {weight, call.shard.is_sharded() ? Quantized{call.weight[0], Tensor(), Tensor()} : weight};
}

// Unquantized operands of linear: the op below autograd, which traces show.
Tensor unquantized_product(const LinearCall& call) {
  const BelowAutograd guard;
  constexpr std::string_view none = "none";
  if (!call.buffers.out) {
    return ops::linear(call.input, call.weight[0], call.bias, none, none, none, std::nullopt, std::nullopt,
                       true, none, std::nullopt, false, std::nullopt, "", 1, "");
  }
  ops::linear_out(call.input, call.weight[0], *call.buffers.out, call.bias, none, none, none, std::nullopt,
                  std::nullopt, true, none, std::nullopt, false, std::nullopt);
  return *call.buffers.out;
}

// What the forward saves for the backward.
struct SavedTensors {
  // Of the input what the weight gradient reads, and of the weight what the data gradient reads.
  Quantized input, weight;
  Tensor group_sizes, column_sizes;
  // Where it contributes to the gradient of its scale.
  Tensor bias, bias_scale;
  // Of delayed scaling.
  Tensor scale, amax;
  // Of a weight that is several matrices: these, or this rank's shards of them.
  variable_list matrices = {};

  variable_list pack() {
    variable_list list;
    list.reserve(kBeforeMatrices + matrices.size());
    for (const Tensor* tensor : before_matrices()) list.push_back(*tensor);
    list.insert(list.end(), matrices.begin(), matrices.end());
    return list;
  }

  static SavedTensors unpack(const variable_list& list) {
    SavedTensors saved;
    auto next = list.begin();
    for (Tensor* tensor : saved.before_matrices()) *tensor = *next++;
    saved.matrices.assign(next, list.end());
    return saved;
  }

 private:
  static constexpr size_t kBeforeMatrices = 12;

  // In the order in which they are saved.
  std::array<Tensor*, kBeforeMatrices> before_matrices() {
    return {&input.data,  &input.scale,  &input.amax, &weight.data, &weight.scale, &weight.amax,
            &group_sizes, &column_sizes, &bias,       &bias_scale,  &scale,        &amax};
  }
};

// The backward of operands that are quantized, grouped or sharded.
class Backward {
 public:
  Backward(AutogradContext* ctx, const Tensor& grad_output)
      : ctx_(ctx),
        saved_(SavedTensors::unpack(ctx->get_saved_variables())),
        formats_(operand_formats("linear", text("input_format"), text("weight_format"), text("grad_format"))),
        options_(saved_options(ctx)),
        ranks_{number("sequence_parallel_size", 1), text("sequence_parallel_group")},
        shard_(saved_weight_shard(ctx)),
        matrices_(static_cast<size_t>(number("matrices", 1))),
        group_sizes_(as_optional(saved_.group_sizes)),
        column_sizes_(as_optional(saved_.column_sizes)),
        scale_(as_optional(saved_.scale)),
        amax_(as_optional(saved_.amax)),
        grad_(as_matrix(grad_output)) {  // that of a buffer may have more dimensions
    saved_.input.format = formats_.input;
    saved_.input.key = formats_.input_key;
    saved_.input.transposed = !scale_;
    saved_.weight.format = formats_.weight;
    saved_.weight.key = formats_.weight_key;
    saved_.weight.transposed = has("weight_columns");
  }

  variable_list run() {
    const SharedOffsets shared(saved_.column_sizes);
    const auto destination =
        wgrad_destination({ctx_, 1, matrices_, group_sizes_.has_value()}, kMainGrad, shard_);
    const bool needs_input_grad = ctx_->needs_input_grad(0), needs_weight_grad = destination != nullptr;
    Tensor grad_input, grad_bias, grad_scale;
    variable_list grad_weight(matrices_);
    if (needs_input_grad || needs_weight_grad) {
      const QuantizedGradient grad = quantized_gradient(needs_input_grad, needs_weight_grad);
      grad_bias = grad.bias;
      const bool weight_first = needs_weight_grad && destination->goes_first();
      if (weight_first) grad_weight = compute_weight(*destination, grad.values);
      if (needs_input_grad) {
        grad_input = data_gradient(grad.values.rowwise);
      } else {
        announce_use_in_backward(ctx_, kMainGrad, shard_);
      }
      if (needs_weight_grad && !weight_first) grad_weight = compute_weight(*destination, grad.values);
      if (needs_weight_grad) destination->finish(grad_weight, grad_input);
    }
    if (!grad_bias.defined()) std::tie(grad_bias, grad_scale) = bias_gradients_of();
    variable_list result{grad_input};
    result.insert(result.end(), grad_weight.begin(), grad_weight.end());
    result.insert(result.end(), {grad_bias, grad_scale, Tensor(), Tensor()});
    return result;
  }

 private:
  bool has(const char* name) const { return ctx_->saved_data.find(name) != ctx_->saved_data.end(); }
  std::string_view text(const char* name) const {
    const auto found = ctx_->saved_data.find(name);
    return found == ctx_->saved_data.end() ? std::string_view("none") : found->second.toStringRef();
  }
  int64_t number(const char* name, int64_t otherwise) const {
    const auto found = ctx_->saved_data.find(name);
    return found == ctx_->saved_data.end() ? otherwise : found->second.toInt();
  }

  size_t place_of_bias() const { return 1 + matrices_; }

  QuantizedGradient quantized_gradient(bool rowwise, bool columnwise) const {
    if (scale_)
      return {{quantize_delayed(grad_, column_sizes_, {scale_, amax_}, formats_, ScaleRole::kGradient), {}},
              {}};
    const bool with_bias =
        has(kHasBias) && !saved_.bias_scale.defined() && ctx_->needs_input_grad(place_of_bias());
    QuantizedGradient grad = quantize_gradient(grad_, column_sizes_, formats_.grad, formats_.grad_key,
                                               rowwise, columnwise, with_bias);
    if (grad.bias.defined() && column_sizes_ && !group_sizes_) grad.bias = grad.bias.squeeze(0);
    return grad;
  }

  variable_list compute_weight(WgradDestination& destination, const QuantizedOperand& grad) const {
    const Quantized grad_columns = scale_ ? transposed_operand(grad.rowwise, column_sizes_) : grad.columnwise;
    return destination.compute(
        {grad_columns, columnwise_input(), column_sizes_, grad_.scalar_type(), options_});
  }

  // Where the rowwise operand or the input itself was saved, transposes or quantizes it now.
  Quantized columnwise_input() const {
    if (scale_) return transposed_operand(saved_.input, column_sizes_);
    const Tensor& own = saved_.input.data;
    if (!has("original_input")) return saved_.input;
    const Tensor input = ranks_.is_sharded() ? all_gather_rows(own, ranks_) : own;
    return quantize_operand(input, column_sizes_, formats_.input, formats_.input_key, false, true).columnwise;
  }

  Tensor data_gradient(const Quantized& grad) const {
    const WeightSource source{saved_.matrices, {}, shard_};
    const WeightForBackward weight =
        scale_ ? WeightForBackward{delayed_weight()} : source.for_backward(saved_.weight, formats_);
    const Tensor result =
        as_matrix(gemm_of({.a = grad,
                           .b = weight.values,
                           .matrices = weight.matrices(),
                           .group_sizes = group_sizes_,
                           .transpose_b = weight.values.transposed,
                           .dtype = grad_.scalar_type(),
                           .options = options_,
                           .out = saved_dgrad_out(ctx_, group_sizes_ ? "grouped_linear" : "linear", grad_)}));
    return ranks_.is_sharded() ? reduce_scatter_rows(result, ranks_) : result;
  }

  // As the forward had it, transposed where a kernel needs it.
  Quantized delayed_weight() const {
    Quantized weight = saved_.weight;
    if (shard_.is_sharded()) {
      const WeightSource source{saved_.weight.data, {}, shard_};
      weight = quantize_delayed(source.values(true), std::nullopt, {scale_, kNoTensor}, formats_,
                                ScaleRole::kWeight);
    }
    return has_quantized_kernels(weight.data) ? transposed_operand(weight, kNoTensor) : weight;
  }

  // From the gradient before quantization.
  std::pair<Tensor, Tensor> bias_gradients_of() const {
    const bool has_bias = has(kHasBias);
    if (group_sizes_) {
      return bias_gradients(ctx_, has_bias, grad_, *group_sizes_, saved_.bias, saved_.bias_scale,
                            place_of_bias());
    }
    if (!has_bias || !ctx_->needs_input_grad(place_of_bias())) return {};
    return {ops::bias_backward(grad_), Tensor()};
  }

  AutogradContext* const ctx_;
  SavedTensors saved_;
  const OperandFormats formats_;
  const LaunchOptions options_;
  const SequenceParallel ranks_;
  const sharded::WeightShard shard_;
  const size_t matrices_;  // how many tensors the weight is
  const OptionalTensor group_sizes_, column_sizes_, scale_, amax_;
  const Tensor grad_;
};

class LinearFunction : public DifferentiableFunction<LinearFunction> {
 public:
  static constexpr const char *kName = "linear", *kGroupedName = "grouped_linear";
  static constexpr bool is_traceable = true;

  // The backward of a plain call calls differentiable ops.
  static bool keeps_graphs(const AutogradContext* ctx) { return ctx->saved_data.empty(); }
  static const char* op_of(const AutogradContext* ctx) {
    const auto grouped = ctx->saved_data.find(kIsGrouped);
    return grouped != ctx->saved_data.end() && grouped->second.toBool() ? kGroupedName : kName;
  }

  static Tensor forward(AutogradContext* ctx, const Tensor& input, at::TensorList weight,
                        const OptionalTensor& bias, const OptionalTensor& bias_scale, const LinearCall& call,
                        const OperandFormats& formats) {
    const bool needs_input_grad = input.requires_grad(), needs_weight_grad = requires_grad(weight);
    if (needs_weight_grad) save_wgrad_destination(ctx, kMainGrad, call.main_grad, weight, call.shard);
    if (needs_input_grad) save_dgrad_out(ctx, call.buffers);
    if (call.is_local_and_unquantized() && !call.group_sizes) {
      variable_list saved{needs_weight_grad ? input : Tensor(), needs_input_grad ? weight[0] : Tensor()};
      if (bias) saved.emplace_back();  // stands for it: an entry of saved_data would cost more host time
      ctx->save_for_backward(std::move(saved));
      return unquantized_product(call);
    }
    save_options_of(ctx, call);
    SavedTensors saved;
    if (requires_grad(bias_scale)) saved.bias = *bias;
    saved.bias_scale = or_undefined(bias_scale);
    const Tensor output = forward_of(ctx, call, formats, saved, {needs_input_grad, needs_weight_grad});
    ctx->save_for_backward(saved.pack());
    return output;
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const bool is_unquantized = ctx->saved_data.find(kIsGrouped) == ctx->saved_data.end();
    return is_unquantized ? unquantized_gradients(ctx, grads[0]) : Backward(ctx, grads[0]).run();
  }

 private:
  struct NeedsGrad {
    bool input, weight;
  };

  // Only those that are set, as each entry costs host time; kIsGrouped always, by which the backward knows the others.
  static void save_options_of(AutogradContext* ctx, const LinearCall& call) {
    const auto& [input_key, weight_key, grad_key] = call.keys;
    ctx->saved_data[kIsGrouped] = call.group_sizes.has_value();
    if (call.bias) ctx->saved_data[kHasBias] = true;
    if (!call.keys.unquantized()) {
      ctx->saved_data["input_format"] = std::string(input_key);
      ctx->saved_data["weight_format"] = std::string(weight_key);
      ctx->saved_data["grad_format"] = std::string(grad_key);
    }
    if (call.sequence_parallel.is_sharded()) {
      ctx->saved_data["sequence_parallel_size"] = call.sequence_parallel.size;
      ctx->saved_data["sequence_parallel_group"] = std::string(call.sequence_parallel.group);
    }
    if (call.weight.size() > 1) ctx->saved_data["matrices"] = static_cast<int64_t>(call.weight.size());
    save_options(ctx, call.options);
    save_weight_shard(ctx, call.shard);
  }

  // Whether the backward quantizes the input again, columnwise, in place of the forward.
  static bool keeps_original(const LinearCall& call, const OperandFormats& formats) {
    if (call.delayed.scale) return false;
    // Another rounding would draw other numbers.
    if (call.sequence_parallel.is_sharded()) return !formats.input.stochastic_rounding;
    return call.save_original_input && !formats.unquantized();
  }

  static Tensor forward_of(AutogradContext* ctx, const LinearCall& call, const OperandFormats& formats,
                           SavedTensors& saved, NeedsGrad needs_grad) {
    const BelowAutograd guard;
    const OptionalTensor column_sizes =
        needs_grad.weight && !call.delayed.scale
            ? column_groups(call.input, call.group_sizes, formats, call.sequence_parallel.size)
            : call.group_sizes;
    const SharedOffsets shared(or_undefined(column_sizes));
    saved.group_sizes = or_undefined(call.group_sizes);
    saved.column_sizes = or_undefined(column_sizes);
    const bool original = keeps_original(call, formats);
    const QuantizedOperand input = input_operand(call, formats, column_sizes, needs_grad.weight && !original);
    const QuantizedWeight weight = weight_operand(call, formats, needs_grad.input);
    if (needs_grad.weight && original) {
      ctx->saved_data["original_input"] = true;
      saved.input.data = call.input;
    } else if (needs_grad.weight) {
      saved.input = call.delayed.scale ? input.rowwise : input.columnwise;
    }
    if (needs_grad.input) {
      saved.weight = weight.backward;
      saved.matrices = weight.matrices_to_save();
      if (saved.weight.transposed) ctx->saved_data["weight_columns"] = true;
    }
    if (call.delayed.scale) {
      saved.scale = *call.delayed.scale;
      if (call.delayed.amax) saved.amax = untracked_amax(*call.delayed.amax);
    }
    return product_of(call, input.rowwise, weight.forward, weight.matrices);
  }

  // Of this rank's operands, unquantized: two tensors were saved. The bias's gradient is float32; the autograd engine casts it to the
  // bias's dtype.
  static variable_list unquantized_gradients(AutogradContext* ctx, const Tensor& grad_output) {
    const variable_list saved = ctx->get_saved_variables();
    const Tensor grad = as_matrix(grad_output);
    Tensor grad_input, grad_weight, grad_bias;
    if (ctx->needs_input_grad(0)) {
      const OptionalTensor into = saved_dgrad_out(ctx, kName, grad);
      if (into) {
        call_gemm_out(grad, saved[1], as_matrix(*into), /*transpose_b=*/false, /*accumulate=*/false);
        mark_written(*into);
      }
      grad_input =
          into ? *into
               : from_matrix(call_gemm(grad, saved[1], kNoTensor, false, grad.scalar_type()), grad_output);
    }
    const auto destination =
        wgrad_destination({ctx, 1, 1, /*is_grouped=*/false}, kMainGrad, sharded::kUnsharded);
    if (destination) {
      const Quantized rows{grad, Tensor(), Tensor()}, input{as_matrix(saved[0]), Tensor(), Tensor()};
      grad_weight = destination->compute({rows, input, kNoTensor, grad.scalar_type()})[0];
    }
    const bool has_bias = saved.size() > 2;
    if (has_bias && ctx->needs_input_grad(2)) grad_bias = ops::bias_backward(grad);
    return {grad_input, grad_weight, grad_bias, Tensor(), Tensor(), Tensor()};
  }
};

}  // namespace

Tensor linear_forward(const LinearCall& call, const OperandFormats& formats) {
  const SharedOffsets shared(or_undefined(call.group_sizes));
  const QuantizedOperand input = input_operand(call, formats, call.group_sizes, false);
  const QuantizedWeight weight = weight_operand(call, formats, false);
  return product_of(call, input.rowwise, weight.forward, weight.matrices);
}

Tensor linear_with_gradient(const LinearCall& call, const OperandFormats& formats) {
  return LinearFunction::apply(call.input, call.weight, call.bias, call.bias_scale, call, formats);
}

}  // namespace transformer_plugin::linear
