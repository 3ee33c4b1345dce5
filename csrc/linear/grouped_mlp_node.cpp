#include "linear/grouped_mlp_node.h"

#include <array>
#include <string>
#include <utility>

#include "activation/node.h"
#include "common/autograd.h"
#include "common/ops/gemm.h"
#include "common/shared_offsets.h"
#include "common/tensor.h"
#include "gemm/ops/calls.h"
#include "linear/grouped_mlp_checks.h"
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
  bool input = false, fc1_weight = false, fc2_weight = false;
  bool fc1_out = false;  // for any gradient of what comes before fc2
};

// What the forward saves for the backward.
struct SavedTensors {
  // Columnwise, for the weight gradients.
  Quantized input, activation;
  // The weights, for the data gradients.
  Quantized fc1, fc2;
  Tensor fc1_out;
  Tensor group_sizes, probs;
  // Where it contributes to the gradient of `probs`.
  Tensor fc2_bias;
  TokenRows rows;
  // Of weights that are several matrices without scales.
  variable_list fc1_matrices, fc2_matrices;

  variable_list pack() {
    variable_list list;
    list.reserve(kBeforeMatrices + fc1_matrices.size() + fc2_matrices.size());
    for (const Tensor* tensor : before_matrices()) list.push_back(*tensor);
    list.insert(list.end(), fc1_matrices.begin(), fc1_matrices.end());
    list.insert(list.end(), fc2_matrices.begin(), fc2_matrices.end());
    return list;
  }

  // `fc1_count`, `fc2_count`: how many matrices of each weight were saved.
  static SavedTensors unpack(const variable_list& list, size_t fc1_count, size_t fc2_count) {
    SavedTensors saved;
    auto next = list.begin();
    for (Tensor* tensor : saved.before_matrices()) *tensor = *next++;
    const auto fc2_begin = next + static_cast<ptrdiff_t>(fc1_count);
    saved.fc1_matrices.assign(next, fc2_begin);
    saved.fc2_matrices.assign(fc2_begin, fc2_begin + static_cast<ptrdiff_t>(fc2_count));
    return saved;
  }

 private:
  static constexpr size_t kBeforeMatrices = 18;

  // In the order in which they are saved.
  std::array<Tensor*, kBeforeMatrices> before_matrices() {
    return {&input.data, &input.scale, &input.amax, &activation.data, &activation.scale, &activation.amax,
            &fc1.data,   &fc1.scale,   &fc1.amax,   &fc2.data,        &fc2.scale,        &fc2.amax,
            &fc1_out,    &group_sizes, &probs,      &fc2_bias,        &rows.slot,        &rows.source};
  }
};

// The order of the steps is the order in which stochastic rounding draws its seeds. Operands that are not saved are freed before
// the next allocation.
Tensor forward_of(const MlpArguments& mlp, const OperandFormats& formats, const NeedsGrad& needs_grad,
                  SavedTensors& kept) {
  const SharedOffsets shared(mlp.group_sizes, mlp.zero_tail());
  check_quantizable(mlp, formats, needs_grad.fc1_weight || needs_grad.fc2_weight);
  const BelowAutograd guard;
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
  const bool sums = mlp.rows.given();
  const Tensor output = gemm_of({.a = hidden.activation.rowwise,
                                 .b = fc2.forward,
                                 .matrices = fc2.matrices,
                                 .group_sizes = mlp.group_sizes,
                                 .bias = mlp.fc2_bias,
                                 .bias_scale = bias_scale,
                                 .dtype = mlp.input.scalar_type(),
                                 .options = mlp.options,
                                 .out = sums ? kNoTensor : mlp.buffers.out,
                                 .zero_tail = mlp.zero_tail()});
  return sums ? mlp.rows.sum(output, mlp.buffers.out) : output;
}

constexpr const char *kFc1MainGrad = "fc1_main_grad", *kFc2MainGrad = "fc2_main_grad";

// How many tensors a weight is, and how many of them were saved; one and none is the common case.
void save_matrices(AutogradContext* ctx, const std::string& name, size_t count, size_t saved) {
  if (count > 1) ctx->saved_data[name] = static_cast<int64_t>(count);
  if (saved > 0) ctx->saved_data[name + "_saved"] = true;
}

size_t matrix_count(AutogradContext* ctx, const char* name) {
  const auto count = ctx->saved_data.find(name);
  return count == ctx->saved_data.end() ? 1 : static_cast<size_t>(count->second.toInt());
}

// With the formats and layouts of the operands.
SavedTensors unpack(AutogradContext* ctx, const OperandFormats& formats) {
  const auto count = [&](const std::string& name) {
    const bool is_saved = ctx->saved_data.find(name + "_saved") != ctx->saved_data.end();
    return is_saved ? matrix_count(ctx, name.c_str()) : 0;
  };
  SavedTensors saved =
      SavedTensors::unpack(ctx->get_saved_variables(), count("fc1_matrices"), count("fc2_matrices"));
  const auto has_format = [](Quantized& operand, const Format& format, std::string_view key) {
    operand.format = format;
    operand.key = key;
  };
  has_format(saved.input, formats.input, formats.input_key);
  has_format(saved.activation, formats.input, formats.input_key);
  has_format(saved.fc1, formats.weight, formats.weight_key);
  has_format(saved.fc2, formats.weight, formats.weight_key);
  // Values without scales are not transposed.
  saved.input.transposed = saved.input.scale.defined();
  saved.activation.transposed = saved.activation.scale.defined();
  saved.fc1.transposed = ctx->saved_data["fc1_columns"].toBool();
  saved.fc2.transposed = ctx->saved_data["fc2_columns"].toBool();
  if (reads_tokens(formats.input, formats.input_key)) saved.input.row_index = saved.rows.source;
  return saved;
}

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

// Whether the forward made the quantized weight: without a scale it is the parameter, and with `given` the caller's.
bool quantized_in_forward(const AutogradContext* ctx, const Quantized& weight, const char* given) {
  return weight.scale.defined() && ctx->saved_data.find(given) == ctx->saved_data.end();
}

// The gradient of fc2's bias, and its contribution to that of the probabilities, which scale it; both from the gradient before
// quantization. `bias` is saved if the latter is needed.
std::pair<Tensor, Tensor> fc2_bias_gradients(AutogradContext* ctx, const Tensor& grad, const TokenRows& rows,
                                             const Tensor& group_sizes, const Tensor& probs,
                                             const Tensor& bias, size_t weights) {
  if (!ctx->saved_data["has_fc2_bias"].toBool()) return {};
  const bool has_fc1_bias = ctx->saved_data["has_fc1_bias"].toBool();
  const bool needs_bias_grad = ctx->needs_input_grad(weights + (has_fc1_bias ? 3 : 2));
  const bool needs_probs_grad = ctx->needs_input_grad(weights + 1);
  if (!needs_bias_grad && !needs_probs_grad) return {};
  const Tensor grad_rows = rows.given() ? rows.gather(grad, group_sizes) : grad;
  const auto [grad_bias, grad_probs] = ops::grouped_bias_backward(
      grad_rows, group_sizes, needs_probs_grad ? as_optional(bias) : std::nullopt, probs);
  return {needs_bias_grad ? grad_bias : Tensor(), needs_probs_grad ? grad_probs : Tensor()};
}

}  // namespace

Tensor GroupedMlpFunction::forward(AutogradContext* ctx, const Tensor& input, at::TensorList fc1_weight,
                                   at::TensorList fc2_weight, const Tensor& probs,
                                   const OptionalTensor& fc1_bias, const OptionalTensor& fc2_bias,
                                   const MlpArguments& mlp, const OperandFormats& formats) {
  NeedsGrad needs_grad{input.requires_grad(), requires_grad(fc1_weight), requires_grad(fc2_weight)};
  needs_grad.fc1_out =
      needs_grad.input || needs_grad.fc1_weight || requires_grad(fc1_bias) || probs.requires_grad();
  const bool scales_bias = fc2_bias && probs.requires_grad();
  SavedTensors kept;
  const Tensor output = forward_of(mlp, formats, needs_grad, kept);
  kept.group_sizes = mlp.group_sizes;
  kept.probs = probs;
  if (scales_bias) kept.fc2_bias = *fc2_bias;
  kept.rows = mlp.rows;
  ctx->save_for_backward(kept.pack());
  save_matrices(ctx, "fc1_matrices", fc1_weight.size(), kept.fc1_matrices.size());
  save_matrices(ctx, "fc2_matrices", fc2_weight.size(), kept.fc2_matrices.size());
  if (needs_grad.fc1_weight)
    save_wgrad_destination(ctx, kFc1MainGrad, mlp.fc1_main_grad, fc1_weight, mlp.shard);
  if (needs_grad.fc2_weight)
    save_wgrad_destination(ctx, kFc2MainGrad, mlp.fc2_main_grad, fc2_weight, mlp.shard);
  save_weight_shard(ctx, mlp.shard);
  if (needs_grad.input) save_dgrad_out(ctx, mlp.buffers);
  ctx->saved_data["input_format"] = std::string(formats.input_key);
  ctx->saved_data["weight_format"] = std::string(formats.weight_key);
  ctx->saved_data["grad_format"] = std::string(formats.grad_key);
  activation::save_key(ctx, mlp.activation.key);
  save_options(ctx, mlp.options);
  ctx->saved_data["fc1_columns"] = kept.fc1.transposed;
  ctx->saved_data["fc2_columns"] = kept.fc2.transposed;
  if (mlp.quantized_fc1) ctx->saved_data["fc1_given"] = true;
  if (mlp.quantized_fc2) ctx->saved_data["fc2_given"] = true;
  ctx->saved_data["has_fc1_bias"] = fc1_bias.has_value();
  ctx->saved_data["has_fc2_bias"] = fc2_bias.has_value();
  SavedTensorRelease::prepare(ctx);
  return output;
}

// The gradient of a weight that is sharded over ranks is computed first: while it travels, the data gradient is computed.
// Otherwise lowers the peak of memory: a weight gradient that is larger than the tensors freed after it is computed late. That
// of fc2 then follows the activation's backward, and that of fc1 follows the data gradient.
variable_list GroupedMlpFunction::gradients(AutogradContext* ctx, const variable_list& grads) {
  const auto key = [&](const char* name) -> std::string_view { return ctx->saved_data[name].toStringRef(); };
  const OperandFormats formats =
      operand_formats(kOp, key("input_format"), key("weight_format"), key("grad_format"));
  const SavedTensors kept = unpack(ctx, formats);
  const LaunchOptions options = saved_options(ctx);
  const Tensor &grad = grads[0], &group_sizes = kept.group_sizes, &probs = kept.probs;
  const TokenRows& rows = kept.rows;
  const bool zero_tail = !rows.given();
  const SharedOffsets shared(group_sizes, zero_tail);
  const at::ScalarType dtype = grad.scalar_type();
  const size_t fc1_count = matrix_count(ctx, "fc1_matrices"), fc2_count = matrix_count(ctx, "fc2_matrices"),
               weights = fc1_count + fc2_count;
  const sharded::WeightShard shard = saved_weight_shard(ctx);
  const auto fc1_destination = wgrad_destination({ctx, 1, fc1_count}, kFc1MainGrad, shard);
  const auto fc2_destination = wgrad_destination({ctx, 1 + fc1_count, fc2_count}, kFc2MainGrad, shard);
  const bool needs_fc1_grad = fc1_destination != nullptr, needs_fc2_grad = fc2_destination != nullptr,
             needs_input_grad = ctx->needs_input_grad(0),
             needs_probs_grad = ctx->needs_input_grad(weights + 1),
             has_fc1_bias = ctx->saved_data["has_fc1_bias"].toBool(),
             needs_bias_grad = has_fc1_bias && ctx->needs_input_grad(weights + 2);
  const bool needs_fc1_out_grad = needs_input_grad || needs_fc1_grad || needs_bias_grad || needs_probs_grad;
  auto [grad_fc2_bias, grad_probs] =
      fc2_bias_gradients(ctx, grad, rows, group_sizes, probs, kept.fc2_bias, weights);
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
        formats, {needs_input_grad, needs_fc1_grad, needs_bias_grad});
    fc2 = {};
    release(kept.fc1_out);
    if (quantized_in_forward(ctx, kept.fc2, "fc2_given")) release(kept.fc2.data);
    fc1_grad = std::move(hidden.fc1_out.values);
    grad_fc1_bias = hidden.fc1_out.bias;
    if (needs_probs_grad) grad_probs = grad_probs.defined() ? grad_probs.add(hidden.probs) : hidden.probs;
  }
  if (fc2_is_late) compute_fc2_wgrad();
  const bool fc1_is_late = needs_fc1_grad && fc1_destination->allocates() &&
                           quantized_in_forward(ctx, kept.fc1, "fc1_given") &&
                           grows(fc1_grad.columnwise, kept.input, group_sizes, dtype);
  if (!fc1_is_late) compute_fc1_wgrad();
  if (needs_input_grad) {
    const OptionalTensor out = saved_dgrad_out(ctx, kOp, grad);
    const WeightForBackward fc1 = WeightSource{kept.fc1_matrices, {}, shard}.for_backward(kept.fc1, formats);
    grad_input = gemm_of({.a = fc1_grad.rowwise,
                          .b = fc1.values,
                          .matrices = fc1.matrices(),
                          .group_sizes = group_sizes,
                          .transpose_b = fc1.values.transposed,
                          .dtype = dtype,
                          .options = options,
                          .out = rows.given() ? kNoTensor : out,
                          .zero_tail = zero_tail});
    fc1_grad.rowwise = {};
    if (rows.given()) grad_input = rows.sum(grad_input, out);
  }
  fc1_grad.rowwise = {};
  if (quantized_in_forward(ctx, kept.fc1, "fc1_given")) release(kept.fc1.data);
  if (fc1_is_late) compute_fc1_wgrad();
  if (needs_fc2_grad) fc2_destination->finish(grad_fc2, grad_input);
  if (needs_fc1_grad) fc1_destination->finish(grad_fc1, grad_input);
  return in_order_of_inputs(grad_input, grad_fc1, grad_fc2,
                            {grad_probs, grad_fc1_bias, grad_fc2_bias, Tensor(), Tensor()});
}

Tensor grouped_mlp_forward(const MlpArguments& mlp, const OperandFormats& formats) {
  SavedTensors nothing;
  return forward_of(mlp, formats, {}, nothing);
}

}  // namespace transformer_plugin::linear
