// grouped_mlp: the experts of an MoE layer, in any format and with its gradient. For each group of rows:
// fc2(swiglu(fc1(x)) * prob). One autograd node with the same bits as the three nodes of grouped_linear, swiglu and
// grouped_linear.
#include <ATen/ops/add.h>

#include "common/autograd.h"
#include "common/register.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/swiglu_gemm.h"
#include "gemm/ops/calls.h"
#include "linear/grouped_mlp_activation.h"
#include "linear/quantized_weight.h"
#include "linear/saved_tensor_release.h"
#include "quantize/ops/checks.h"

namespace transformer_plugin::linear {

using namespace gemm;  // layers are made of its ops and checks
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "grouped_mlp";

void check_widths(const Argument& input, const Argument& fc2_weight, const OperandFormats& formats) {
  check_block_width(input, -1, formats, "Pad it with zeros, for example with torch.nn.functional.pad");
  check_block_width(fc2_weight, -1, formats, "Pad the weights with zeros, both halves of the first");
}

OperandFormats check_grouped_mlp(const MlpArguments& mlp, std::string_view input_format,
                                 std::string_view weight_format, std::string_view grad_format) {
  const OperandFormats formats = operand_formats(kOp, input_format, weight_format, grad_format);
  const Argument input{kOp, "input", mlp.input};
  const Argument fc1_weight{kOp, "fc1_weight", mlp.fc1_weight}, fc2_weight{kOp, "fc2_weight", mlp.fc2_weight};
  const Argument probs{kOp, "probs", mlp.probs};
  check_dtype(input, kFloatTypes);
  check_dim(input, 2);
  check_pair(fc1_weight, input, 3);
  check_size(fc1_weight, 2, mlp.input.sym_size(1), "the columns of 'input'");
  const c10::SymInt groups = mlp.fc1_weight.sym_size(0), linear = mlp.fc1_weight.sym_size(1);
  TP_CHECK_VALUE(linear % 2 == 0, kOp, fc1_weight.name,
                 "an even number of rows (gate and linear halves) in each group", describe(mlp.fc1_weight),
                 "Concatenate the two halves along dimension 1");
  check_pair(fc2_weight, input, 3);
  check_size(fc2_weight, 0, groups, "the groups of 'fc1_weight'");
  check_size(fc2_weight, 1, mlp.input.sym_size(1), "the columns of 'input'");
  check_size(fc2_weight, 2, linear / 2, "half the rows of 'fc1_weight' in a group");
  check_groups({kOp, "group_sizes", mlp.group_sizes}, input, fc1_weight);
  check_dtype(probs, {at::kFloat});
  check_dim(probs, 1);
  check_size(probs, 0, mlp.input.sym_size(0), "the rows of 'input'");
  check_same_device(probs, input);
  if (mlp.fc1_bias) check_bias({kOp, "fc1_bias", *mlp.fc1_bias}, input, groups, linear);
  if (mlp.fc2_bias) check_bias({kOp, "fc2_bias", *mlp.fc2_bias}, input, groups, mlp.fc2_weight.sym_size(1));
  check_interleave(kOp, mlp.interleave);
  check_interleaved_columns(fc1_weight, linear / 2, mlp.interleave);
  check_launch_options(kOp, mlp.options);
  check_ragged_formats(kOp, formats);
  check_widths(input, fc2_weight, formats);
  check_quantized_weight("quantized_fc1_weight", mlp.quantized_fc1, fc1_weight, formats);
  check_quantized_weight("quantized_fc2_weight", mlp.quantized_fc2, fc2_weight, formats);
  return formats;
}

// Both GEMMs have the same rows in the same groups, so one check serves them.
void check_quantizable(const MlpArguments& mlp, const OperandFormats& formats, bool columns) {
  const OptionalTensor sizes = mlp.group_sizes, none;
  check_quantizable(kOp, {mlp.input, mlp.fc1_weight, sizes, none, none, std::nullopt}, formats, columns);
  if (formats.input.is_quantized()) {
    quantize::check_matrix({kOp, "fc2_weight", mlp.fc2_weight}, nullptr, formats.weight);
  }
}

// The gradients for which the forward saves tensors.
struct NeedsGrad {
  bool input = false, fc1_weight = false, fc2_weight = false;
  bool linear = false;  // the output of fc1: for any gradient of what comes before fc2
};

struct SavedTensors {
  Quantized input, activation;  // columnwise, for the weight gradients
  Quantized fc1, fc2;           // the weights, for the data gradients
  Tensor linear;                // the output of fc1
};

// The order of the steps is the order in which stochastic rounding draws its seeds. Operands that are not saved are freed before
// the next allocation.
Tensor forward_of(const MlpArguments& mlp, const OperandFormats& formats, const NeedsGrad& wanted,
                  SavedTensors& kept) {
  check_quantizable(mlp, formats, wanted.fc1_weight || wanted.fc2_weight);
  const BelowAutograd guard;
  QuantizedOperand input =
      quantize_role(mlp.input, mlp.group_sizes, formats.input, formats.input_key, true, wanted.fc1_weight);
  QuantizedWeight fc1 = quantize_role_weight(mlp.fc1_weight, mlp.quantized_fc1, formats, wanted.input);
  if (wanted.fc1_weight) kept.input = input.columnwise;
  kept.fc1 = fc1.backward;
  Hidden hidden = product_then_activation(std::move(input), std::move(fc1), mlp, formats, wanted.fc2_weight,
                                          wanted.linear);
  if (wanted.linear) kept.linear = hidden.linear;
  if (wanted.fc2_weight) kept.activation = hidden.activation.columnwise;
  hidden.linear.reset();
  const QuantizedWeight fc2 = quantize_role_weight(mlp.fc2_weight, mlp.quantized_fc2, formats, wanted.linear);
  kept.fc2 = fc2.backward;
  const OptionalTensor bias_scale = mlp.fc2_bias ? OptionalTensor(mlp.probs) : std::nullopt;
  return gemm_of(hidden.activation.rowwise, fc2.forward, mlp.group_sizes, mlp.fc2_bias, bias_scale, true,
                 mlp.input.scalar_type(), mlp.options);
}

class GroupedMlpFunction : public DifferentiableOnce<GroupedMlpFunction> {
 public:
  static constexpr const char* kName = "grouped_mlp";
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& fc1_weight,
                        const Tensor& fc2_weight, const Tensor& group_sizes, const Tensor& probs,
                        const OptionalTensor& fc1_bias, const OptionalTensor& fc2_bias,
                        std::string_view input_key, std::string_view weight_key, std::string_view grad_key,
                        const OptionalList& quantized_fc1, const OptionalList& quantized_fc2,
                        int64_t interleave, int64_t max_sms, int64_t expected_rows) {
    const LaunchOptions options{max_sms, expected_rows};
    const MlpArguments mlp{input,    fc1_weight,    fc2_weight,    group_sizes, probs,  fc1_bias,
                           fc2_bias, quantized_fc1, quantized_fc2, interleave,  options};
    const OperandFormats formats = operand_formats(kOp, input_key, weight_key, grad_key);
    NeedsGrad wanted{input.requires_grad(), fc1_weight.requires_grad(), fc2_weight.requires_grad()};
    wanted.linear = wanted.input || wanted.fc1_weight || wants_grad(fc1_bias) || probs.requires_grad();
    const bool scales_bias = fc2_bias && probs.requires_grad();
    SavedTensors kept;
    const Tensor output = forward_of(mlp, formats, wanted, kept);
    ctx->save_for_backward({kept.input.data, kept.input.scale, kept.input.amax, kept.activation.data,
                            kept.activation.scale, kept.activation.amax, kept.fc1.data, kept.fc1.scale,
                            kept.fc1.amax, kept.fc2.data, kept.fc2.scale, kept.fc2.amax, kept.linear,
                            group_sizes, probs, scales_bias ? *fc2_bias : Tensor()});
    ctx->saved_data["input_format"] = std::string(input_key);
    ctx->saved_data["weight_format"] = std::string(weight_key);
    ctx->saved_data["grad_format"] = std::string(grad_key);
    if (interleave != 0) ctx->saved_data["interleave"] = interleave;
    save_options(ctx, options);
    ctx->saved_data["fc1_columns"] = !formats.native() && quantizes_weight_columnwise(fc1_weight, formats);
    ctx->saved_data["fc2_columns"] = !formats.native() && quantizes_weight_columnwise(fc2_weight, formats);
    if (quantized_fc1) ctx->saved_data["fc1_given"] = true;
    if (quantized_fc2) ctx->saved_data["fc2_given"] = true;
    ctx->saved_data["has_fc1_bias"] = fc1_bias.has_value();
    ctx->saved_data["has_fc2_bias"] = fc2_bias.has_value();
    SavedTensorRelease::prepare(ctx);
    return output;
  }

  static SavedTensors unpack(const variable_list& saved, const OperandFormats& formats, bool fc1_columns,
                             bool fc2_columns) {
    const auto input = [&](size_t i) {
      const bool transposed = saved[i + 1].defined();  // values without scales are not
      return Quantized{saved[i], saved[i + 1], saved[i + 2], formats.input, formats.input_key, transposed};
    };
    const auto weight = [&](size_t i, bool transposed) {
      return Quantized{saved[i], saved[i + 1], saved[i + 2], formats.weight, formats.weight_key, transposed};
    };
    return {input(0), input(3), weight(6, fc1_columns), weight(9, fc2_columns), saved[12]};
  }

  // Lowers the peak of memory: a weight gradient that is larger than the tensors freed after it is computed late. That of fc2
  // then follows the activation's backward, and that of fc1 follows the data gradient.
  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const std::string input_key = ctx->saved_data["input_format"].toStringRef();
    const std::string weight_key = ctx->saved_data["weight_format"].toStringRef();
    const std::string grad_key = ctx->saved_data["grad_format"].toStringRef();
    const OperandFormats formats = operand_formats(kOp, input_key, weight_key, grad_key);
    const bool fc1_columns = ctx->saved_data["fc1_columns"].toBool(),
               fc2_columns = ctx->saved_data["fc2_columns"].toBool();
    const SavedTensors kept = unpack(saved, formats, fc1_columns, fc2_columns);
    const LaunchOptions options = saved_options(ctx);
    const auto interleave = ctx->saved_data.find("interleave");
    const Tensor &grad = grads[0], &group_sizes = saved[13], &probs = saved[14];
    const at::ScalarType dtype = grad.scalar_type();
    const bool wants_input = ctx->needs_input_grad(0), wants_fc1 = ctx->needs_input_grad(1),
               wants_fc2 = ctx->needs_input_grad(2), wants_probs = ctx->needs_input_grad(4),
               wants_fc1_bias = ctx->saved_data["has_fc1_bias"].toBool() && ctx->needs_input_grad(5);
    const bool wants_linear = wants_input || wants_fc1 || wants_fc1_bias || wants_probs;

    auto [grad_fc2_bias, grad_probs] = fc2_bias_gradients(ctx, grad, group_sizes, probs, saved[15]);
    Tensor grad_input, grad_fc1, grad_fc1_bias, grad_fc2;
    QuantizedOperand g;
    if (wants_linear || wants_fc2) {
      g = quantize_role(grad, group_sizes, formats.grad, grad_key, wants_linear, wants_fc2);
    }
    const SavedTensorRelease release(ctx);
    QuantizedOperand linear;  // the gradient of the output of fc1
    const auto compute_fc2_wgrad = [&] {
      if (wants_fc2) {
        grad_fc2 = wgrad_of(g.columnwise, kept.activation, group_sizes, dtype, options);
      }
      g.columnwise = {};
      release(kept.activation.data);
    };
    const auto compute_fc1_wgrad = [&] {
      if (wants_fc1) {
        grad_fc1 = wgrad_of(linear.columnwise, kept.input, group_sizes, dtype, options);
      }
      linear.columnwise = {};
      if (kept.input.scale.defined()) release(kept.input.data);
    };
    const bool fc2_is_late = wants_fc2 && grows(g.columnwise, kept.activation, group_sizes, dtype);
    if (!fc2_is_late) compute_fc2_wgrad();
    if (wants_linear) {
      HiddenGradient hidden = data_gradient_then_activation_backward(
          std::move(g.rowwise), kept.fc2, fc2_columns, kept.linear, group_sizes, probs, formats,
          {wants_input, wants_fc1, wants_fc1_bias},
          interleave == ctx->saved_data.end() ? 0 : interleave->second.toInt(), options);
      release(kept.linear);
      if (quantized_in_forward(ctx, kept.fc2, "fc2_given")) release(kept.fc2.data);
      linear = std::move(hidden.linear.values);
      grad_fc1_bias = hidden.linear.bias;
      if (wants_probs) {
        grad_probs = grad_probs.defined() ? at::add(grad_probs, hidden.probs) : hidden.probs;
      }
    }
    if (fc2_is_late) compute_fc2_wgrad();
    const bool fc1_is_late = wants_fc1 && quantized_in_forward(ctx, kept.fc1, "fc1_given") &&
                             grows(linear.columnwise, kept.input, group_sizes, dtype);
    if (!fc1_is_late) compute_fc1_wgrad();
    if (wants_input) {
      grad_input = gemm_of(linear.rowwise, kept.fc1, group_sizes, std::nullopt, std::nullopt, fc1_columns,
                           dtype, options);
    }
    linear.rowwise = {};
    if (quantized_in_forward(ctx, kept.fc1, "fc1_given")) release(kept.fc1.data);
    if (fc1_is_late) compute_fc1_wgrad();
    return {grad_input, grad_fc1, grad_fc2, Tensor(), grad_probs, grad_fc1_bias, grad_fc2_bias, Tensor(),
            Tensor(),   Tensor(), Tensor(), Tensor(), Tensor(),   Tensor(),      Tensor()};
  }

  // Whether a weight gradient is larger than the operands that are freed after it, as it is where experts have fewer rows than
  // their weights are wide. False where a tracer does not know the sizes.
  static bool grows(const Quantized& grad, const Quantized& activation, const Tensor& group_sizes,
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
  static bool quantized_in_forward(const AutogradContext* ctx, const Quantized& weight, const char* given) {
    return weight.scale.defined() && ctx->saved_data.find(given) == ctx->saved_data.end();
  }

  // The gradient of fc2's bias, and its contribution to that of the probabilities, which scale it; both from the gradient before
  // quantization. `bias` is saved if the latter is needed.
  static std::pair<Tensor, Tensor> fc2_bias_gradients(AutogradContext* ctx, const Tensor& grad,
                                                      const Tensor& group_sizes, const Tensor& probs,
                                                      const Tensor& bias) {
    if (!ctx->saved_data["has_fc2_bias"].toBool()) return {};
    const bool wants_bias = ctx->needs_input_grad(ctx->saved_data["has_fc1_bias"].toBool() ? 6 : 5);
    const bool wants_probs = ctx->needs_input_grad(4);
    if (!wants_bias && !wants_probs) return {};
    const auto [grad_bias, grad_probs] =
        call_grouped_bias_backward(grad, group_sizes, wants_probs ? as_optional(bias) : std::nullopt, probs);
    return {wants_bias ? grad_bias : Tensor(), wants_probs ? grad_probs : Tensor()};
  }
};

// Calls the op below autograd.
Tensor redispatch(const MlpArguments& mlp, const OperandFormats& formats) {
  using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                           const OptionalTensor&, const OptionalTensor&, std::string_view, std::string_view,
                           std::string_view, OptionalList, OptionalList, int64_t, int64_t, int64_t);
  static const auto op = find_op<Signature>(kOp);
  const BelowAutograd guard;
  return op.call(mlp.input, mlp.fc1_weight, mlp.fc2_weight, mlp.group_sizes, mlp.probs, mlp.fc1_bias,
                 mlp.fc2_bias, formats.input_key, formats.weight_key, formats.grad_key, mlp.quantized_fc1,
                 mlp.quantized_fc2, mlp.interleave, mlp.options.max_sms, mlp.options.expected_rows);
}

enum class Kernel { kCompute, kMeta, kAutograd };

template <Kernel kernel>
Tensor grouped_mlp(const Tensor& input, const Tensor& fc1_weight, const Tensor& fc2_weight,
                   const Tensor& group_sizes, const Tensor& probs, const OptionalTensor& fc1_bias,
                   const OptionalTensor& fc2_bias, std::string_view input_format,
                   std::string_view weight_format, std::string_view grad_format, OptionalList quantized_fc1,
                   OptionalList quantized_fc2, int64_t interleave, int64_t max_sms, int64_t expected_rows) {
  const MlpArguments mlp{input,
                         fc1_weight,
                         fc2_weight,
                         group_sizes,
                         probs,
                         fc1_bias,
                         fc2_bias,
                         quantized_fc1,
                         quantized_fc2,
                         interleave,
                         {max_sms, expected_rows}};
  if constexpr (kernel == Kernel::kAutograd) {
    if (any_wants_grad(input, fc1_weight, fc2_weight, probs, fc1_bias, fc2_bias)) {
      check_grouped_mlp(mlp, input_format, weight_format, grad_format);
      return GroupedMlpFunction::apply(input, fc1_weight, fc2_weight, group_sizes, probs, fc1_bias, fc2_bias,
                                       input_format, weight_format, grad_format, quantized_fc1, quantized_fc2,
                                       interleave, max_sms, expected_rows);
    }
    return redispatch(mlp, {input_format, weight_format, grad_format, {}, {}, {}});
  }
  const OperandFormats formats = check_grouped_mlp(mlp, input_format, weight_format, grad_format);
  if constexpr (kernel == Kernel::kMeta) return empty(input, input.sym_sizes(), input.scalar_type());
  SavedTensors nothing;
  return forward_of(mlp, formats, {}, nothing);
}

}  // namespace

TP_IMPL(kOp, grouped_mlp<Kernel::kCompute>, grouped_mlp<Kernel::kMeta>, grouped_mlp<Kernel::kAutograd>);

}  // namespace transformer_plugin::linear
