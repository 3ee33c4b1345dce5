#include "linear/grouped_mlp_node.h"

#include <tuple>
#include <utility>

#include "activation/node.h"
#include "common/autograd.h"
#include "common/ops/gemm.h"
#include "common/shared_offsets.h"
#include "common/tensor.h"
#include "gemm/ops/calls.h"
#include "linear/grouped_mlp_checks.h"
#include "linear/grouped_mlp_saved.h"
#include "linear/products.h"
#include "linear/saved_tensor_release.h"
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

constexpr const char* kOp = "grouped_mlp";

// The gradients for which the forward saves tensors.
struct NeedsGrad {
  bool any = false;
  bool input = false, fc1_weight = false, fc2_weight = false, probs = false;
  bool fc1_out = false;  // for any gradient of what comes before fc2

  bool weights() const { return fc1_weight || fc2_weight; }
};

// The order of the steps is the order in which stochastic rounding draws its seeds. Operands that are not saved are freed before
// the next allocation. Returns the rows of the experts, in `out` if there is one.
Tensor expert_rows(const MlpArguments& mlp, const OperandFormats& formats, const NeedsGrad& needs_grad,
                   const OptionalTensor& out, SavedTensors& kept) {
  QuantizedOperand input = rows_operand(mlp.input, mlp.rows, mlp.group_sizes, formats.input,
                                        formats.input_key, true, needs_grad.fc1_weight);
  const WeightSource fc1_source{mlp.fc1_weight, mlp.quantized_fc1, mlp.shard},
      fc2_source{mlp.fc2_weight, mlp.quantized_fc2, mlp.shard};
  QuantizedWeight fc1 = fc1_source.for_forward(formats, needs_grad.input);
  if (needs_grad.fc1_weight) kept.input = input.columnwise;
  kept.fc1 = fc1.backward;
  if (needs_grad.input) kept.fc1_matrices = fc1.matrices;
  Hidden hidden;
  if (fuses_fc1_activation(input.rowwise, fc1, mlp)) {
    hidden =
        fused_fc1_activation(input.rowwise, fc1, mlp, formats, needs_grad.fc2_weight, needs_grad.fc1_out);
  } else {
    const Tensor fc1_out = gemm_of({.a = input.rowwise,
                                    .b = fc1.forward,
                                    .matrices = fc1.matrices,
                                    .group_sizes = mlp.group_sizes,
                                    .bias = mlp.fc1_bias,
                                    .dtype = mlp.input.scalar_type(),
                                    .options = mlp.options,
                                    .zero_tail = mlp.zero_tail()});
    input = {};  // freed before the activation is allocated
    fc1 = {};
    hidden = activation_of(fc1_out, mlp, formats, needs_grad.fc2_weight);
  }
  input = {};
  fc1 = {};
  if (needs_grad.fc1_out) kept.fc1_out = hidden.fc1_out;
  if (needs_grad.fc2_weight) kept.activation = hidden.activation.columnwise;
  hidden.fc1_out.reset();
  const QuantizedWeight fc2 = fc2_source.for_forward(formats, needs_grad.fc1_out);
  kept.fc2 = fc2.backward;
  if (needs_grad.fc1_out) kept.fc2_matrices = fc2.matrices;
  const OptionalTensor bias_scale = mlp.fc2_bias ? OptionalTensor(mlp.probs) : std::nullopt;
  return gemm_of({.a = hidden.activation.rowwise,
                  .b = fc2.forward,
                  .matrices = fc2.matrices,
                  .group_sizes = mlp.group_sizes,
                  .bias = mlp.fc2_bias,
                  .bias_scale = bias_scale,
                  .dtype = mlp.input.scalar_type(),
                  .options = mlp.options,
                  .out = out,
                  .zero_tail = mlp.zero_tail()});
}

// What this rank can check is checked before it sends tokens, for which the other ranks then wait.
Tensor forward_over_ranks(const MlpArguments& mlp, const OperandFormats& formats, const NeedsGrad& needs_grad,
                          SavedTensors& kept) {
  const Tensor sized = RankExchange::sized_as_received(mlp.input, mlp.rows);
  check_quantizable(mlp.of_received(sized, mlp.probs), formats, needs_grad.weights());
  const BelowAutograd guard;
  const TokenGrads token_grads{needs_grad.input, needs_grad.probs};
  const auto [tokens, probs] = mlp.ranks.dispatch(mlp.input, mlp.probs, mlp.rows, token_grads);
  kept.probs = probs;
  const c10::SymInt num_tokens = mlp.input.sym_size(0);
  kept.ranks = {mlp.ranks, num_tokens, token_grads};
  const Tensor rows = expert_rows(mlp.of_received(tokens, probs), formats, needs_grad, std::nullopt, kept);
  return mlp.ranks.combine(rows, mlp.rows, num_tokens, needs_grad.any);
}

Tensor forward_of(const MlpArguments& mlp, const OperandFormats& formats, const NeedsGrad& needs_grad,
                  SavedTensors& kept) {
  const SharedOffsets shared(mlp.group_sizes, mlp.zero_tail());
  if (mlp.ranks.given()) return forward_over_ranks(mlp, formats, needs_grad, kept);
  check_quantizable(mlp, formats, needs_grad.weights());
  const BelowAutograd guard;
  kept.probs = mlp.probs;
  const OptionalTensor& out = mlp.buffers.out;
  if (!mlp.rows.given()) return expert_rows(mlp, formats, needs_grad, out, kept);
  return mlp.rows.sum(expert_rows(mlp, formats, needs_grad, std::nullopt, kept), out);
}

constexpr const char *kFc1MainGrad = "fc1_main_grad", *kFc2MainGrad = "fc2_main_grad";

// The gradients of the input, of the tensors of both weights and of the arguments after them.
variable_list in_order_of_inputs(const Tensor& input, const variable_list& fc1, const variable_list& fc2,
                                 std::initializer_list<Tensor> others) {
  variable_list result{input};
  result.insert(result.end(), fc1.begin(), fc1.end());
  result.insert(result.end(), fc2.begin(), fc2.end());
  result.insert(result.end(), others);
  return result;
}

// Whether a weight gradient is larger than the operands that are freed after it, as it is where experts have fewer rows than
// their weights are wide. False where a tracer does not know the sizes.
bool grows(const Quantized& grad, const Quantized& activation, const Tensor& group_sizes,
           at::ScalarType dtype) {
  const auto elements = [](const Quantized& matrix) { return matrix.data.sym_numel().maybe_as_int(); };
  const auto freed = elements(grad), kept = elements(activation);
  const auto rows = grad.columns().maybe_as_int(), columns = activation.columns().maybe_as_int(),
             groups = group_sizes.sym_size(0).maybe_as_int();
  if (!freed || !kept || !rows || !columns || !groups) return false;
  const int64_t own = *groups * *rows * *columns * static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t of_grad = grad.scale.defined()
                              ? *freed
                              : 0;  // without a scale it is the caller's tensor, or still needed rowwise
  return own > of_grad * grad.data.element_size() + *kept * activation.data.element_size();
}

// The gradients that the backward computes, besides those of the weights.
struct ComputedGrads {
  bool input, probs, fc1_bias, fc2_bias;
};

ComputedGrads computed_grads(AutogradContext* ctx, const SavedRankExchange& ranks, size_t weights) {
  const bool has_fc1_bias = ctx->saved_data["has_fc1_bias"].toBool(),
             has_fc2_bias = ctx->saved_data["has_fc2_bias"].toBool();
  ComputedGrads computed{ctx->needs_input_grad(0), ctx->needs_input_grad(weights + 1),
                         has_fc1_bias && ctx->needs_input_grad(weights + 2),
                         has_fc2_bias && ctx->needs_input_grad(weights + (has_fc1_bias ? 3 : 2))};
  // The tokens of other ranks get theirs even if this rank's caller asks for one of the two.
  if (ranks.given() && (computed.input || computed.probs)) {
    computed.input = ranks.recorded.tokens;
    computed.probs = ranks.recorded.weights;
  }
  return computed;
}

// The gradient of fc2's bias, and its contribution to that of the probabilities, which scale it; both from the gradient before
// quantization. The bias is saved if the latter is needed.
std::pair<Tensor, Tensor> fc2_bias_gradients(const Tensor& grad, const SavedTensors& kept,
                                             const ComputedGrads& computed, bool has_fc2_bias) {
  if (!has_fc2_bias || !(computed.fc2_bias || computed.probs)) return {};
  const Tensor grad_rows = kept.rows.given() ? kept.rows.gather(grad, kept.group_sizes) : grad;
  const auto [grad_bias, grad_probs] = ops::grouped_bias_backward(
      grad_rows, kept.group_sizes, computed.probs ? as_optional(kept.fc2_bias) : std::nullopt, kept.probs);
  return {computed.fc2_bias ? grad_bias : Tensor(), computed.probs ? grad_probs : Tensor()};
}

// The data gradient of fc1, of the gradient of its output, which is freed.
Tensor fc1_dgrad(Quantized grad, const SavedTensors& kept, const OperandFormats& formats,
                 const sharded::WeightShard& shard, at::ScalarType dtype, const LaunchOptions& options,
                 const OptionalTensor& out) {
  const WeightForBackward fc1 = WeightSource{kept.fc1_matrices, {}, shard}.for_backward(kept.fc1, formats);
  return gemm_of({.a = grad,
                  .b = fc1.values,
                  .matrices = fc1.matrices(),
                  .group_sizes = kept.group_sizes,
                  .transpose_b = fc1.values.transposed,
                  .dtype = dtype,
                  .options = options,
                  .out = out,
                  .zero_tail = !kept.rows.given()});
}

}  // namespace

Tensor GroupedMlpFunction::forward(AutogradContext* ctx, const Tensor& input, at::TensorList fc1_weight,
                                   at::TensorList fc2_weight, const Tensor& probs,
                                   const OptionalTensor& fc1_bias, const OptionalTensor& fc2_bias,
                                   const MlpArguments& mlp, const OperandFormats& formats) {
  NeedsGrad needs_grad{.any = true,
                       .input = input.requires_grad(),
                       .fc1_weight = requires_grad(fc1_weight),
                       .fc2_weight = requires_grad(fc2_weight),
                       .probs = probs.requires_grad()};
  needs_grad.fc1_out =
      needs_grad.input || needs_grad.fc1_weight || requires_grad(fc1_bias) || needs_grad.probs;
  SavedTensors kept;
  const Tensor output = forward_of(mlp, formats, needs_grad, kept);
  kept.group_sizes = mlp.group_sizes;
  if (fc2_bias && needs_grad.probs) kept.fc2_bias = *fc2_bias;
  kept.rows = mlp.rows;
  kept.save(ctx, mlp, formats);
  if (needs_grad.fc1_weight)
    save_wgrad_destination(ctx, kFc1MainGrad, mlp.fc1_main_grad, fc1_weight, mlp.shard);
  if (needs_grad.fc2_weight)
    save_wgrad_destination(ctx, kFc2MainGrad, mlp.fc2_main_grad, fc2_weight, mlp.shard);
  save_weight_shard(ctx, mlp.shard);
  if (needs_grad.input) save_dgrad_out(ctx, mlp.buffers);
  return output;
}

// The gradient of a weight that is sharded over ranks is computed first: while it travels, the data gradient is computed.
// Otherwise lowers the peak of memory: a weight gradient that is larger than the tensors freed after it is computed late. That
// of fc2 then follows the activation's backward, and that of fc1 follows the data gradient.
variable_list GroupedMlpFunction::gradients(AutogradContext* ctx, const variable_list& grads) {
  const OperandFormats formats = saved_formats(ctx, kOp);
  const SavedTensors kept = SavedTensors::of(ctx, formats);
  const LaunchOptions options = saved_options(ctx);
  const Tensor &group_sizes = kept.group_sizes, &probs = kept.probs;
  const TokenRows& rows = kept.rows;
  const bool zero_tail = !rows.given();
  const SharedOffsets shared(group_sizes, zero_tail);
  const size_t fc1_count = saved_fc1_count(ctx), fc2_count = saved_fc2_count(ctx);
  const sharded::WeightShard shard = saved_weight_shard(ctx);
  const auto fc1_destination = wgrad_destination({ctx, 1, fc1_count}, kFc1MainGrad, shard);
  const auto fc2_destination = wgrad_destination({ctx, 1 + fc1_count, fc2_count}, kFc2MainGrad, shard);
  const ComputedGrads computed = computed_grads(ctx, kept.ranks, fc1_count + fc2_count);
  const bool needs_fc1_grad = fc1_destination != nullptr, needs_fc2_grad = fc2_destination != nullptr;
  const bool needs_fc1_out_grad = computed.input || needs_fc1_grad || computed.fc1_bias || computed.probs;
  // Checked before anything is sent or added up.
  const OptionalTensor out = computed.input ? saved_dgrad_out(ctx, kOp, grads[0]) : std::nullopt;
  const Tensor grad = kept.ranks.given() ? kept.ranks.combine_backward(grads[0], rows) : grads[0];
  const at::ScalarType dtype = grad.scalar_type();
  auto [grad_fc2_bias, grad_probs] =
      fc2_bias_gradients(grad, kept, computed, ctx->saved_data["has_fc2_bias"].toBool());
  Tensor grad_input, grad_fc1_bias;
  variable_list grad_fc1(fc1_count), grad_fc2(fc2_count);
  QuantizedOperand g, fc1_grad;  // the gradients of the outputs of fc2 and fc1
  if (needs_fc1_out_grad || needs_fc2_grad) {
    // A deferred weight gradient keeps rows of its own, because the caller may write to the gradient.
    const bool copies =
        needs_fc2_grad && (fc2_destination->is_deferred() ||
                           !reads_gradient(grad, kept.activation.data, formats.grad, formats.grad_key));
    g = rows_operand(rows.given() && !copies ? grad.contiguous() : grad, rows, group_sizes, formats.grad,
                     formats.grad_key, needs_fc1_out_grad, needs_fc2_grad, copies);
  }
  const SavedTensorRelease release(ctx);
  const auto compute_fc2_wgrad = [&] {
    if (needs_fc2_grad) {
      grad_fc2 = fc2_destination->compute({g.columnwise, kept.activation, group_sizes, dtype, options});
    }
    g.columnwise = {};
    release(kept.activation.data);
  };
  const auto compute_fc1_wgrad = [&] {
    if (needs_fc1_grad) {
      Quantized input = kept.input;
      if (input.row_index.defined() && !fc1_destination->is_deferred()) {
        input.data = rows.gather(input.data, group_sizes);
        input.row_index = Tensor();
      }
      grad_fc1 = fc1_destination->compute({fc1_grad.columnwise, input, group_sizes, dtype, options});
    }
    fc1_grad.columnwise = {};
    if (kept.input.scale.defined()) release(kept.input.data);
  };
  const bool fc2_is_late = needs_fc2_grad && fc2_destination->allocates() &&
                           grows(g.columnwise, kept.activation, group_sizes, dtype);
  if (!fc2_is_late) compute_fc2_wgrad();
  if (needs_fc1_out_grad) {
    WeightForBackward fc2 = WeightSource{kept.fc2_matrices, {}, shard}.for_backward(kept.fc2, formats);
    const auto activation = activation::parse_activation(kOp, activation::saved_key(ctx));
    HiddenGradient hidden = fc2_dgrad_activation_backward(
        std::move(g.rowwise), fc2, {kept.fc1_out, group_sizes, probs, activation, options, zero_tail},
        formats, {computed.input, needs_fc1_grad, computed.fc1_bias});
    fc2 = {};
    release(kept.fc1_out);
    if (quantized_fc2_in_forward(ctx, kept)) release(kept.fc2.data);
    fc1_grad = std::move(hidden.fc1_out.values);
    grad_fc1_bias = hidden.fc1_out.bias;
    if (computed.probs) grad_probs = grad_probs.defined() ? grad_probs.add(hidden.probs) : hidden.probs;
  }
  if (fc2_is_late) compute_fc2_wgrad();
  const bool fc1_is_late = needs_fc1_grad && fc1_destination->allocates() &&
                           quantized_fc1_in_forward(ctx, kept) &&
                           grows(fc1_grad.columnwise, kept.input, group_sizes, dtype);
  if (!fc1_is_late) compute_fc1_wgrad();
  if (computed.input) {
    grad_input = fc1_dgrad(std::move(fc1_grad.rowwise), kept, formats, shard, dtype, options,
                           rows.given() ? kNoTensor : out);
  }
  if (computed.input && rows.given() && !kept.ranks.given()) grad_input = rows.sum(grad_input, out);
  fc1_grad.rowwise = {};
  if (quantized_fc1_in_forward(ctx, kept)) release(kept.fc1.data);
  if (fc1_is_late) compute_fc1_wgrad();
  if (needs_fc2_grad) fc2_destination->finish(grad_fc2, grad_input);
  if (needs_fc1_grad) fc1_destination->finish(grad_fc1, grad_input);
  if (kept.ranks.given() && (computed.input || computed.probs)) {
    std::tie(grad_input, grad_probs) = kept.ranks.dispatch_backward(grad_input, grad_probs, grad, rows, out);
  }
  return in_order_of_inputs(grad_input, grad_fc1, grad_fc2,
                            {grad_probs, grad_fc1_bias, grad_fc2_bias, Tensor(), Tensor()});
}

Tensor grouped_mlp_forward(const MlpArguments& mlp, const OperandFormats& formats) {
  SavedTensors nothing;
  return forward_of(mlp, formats, {}, nothing);
}

}  // namespace transformer_plugin::linear
