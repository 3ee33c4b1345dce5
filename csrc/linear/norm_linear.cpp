// norm_linear: linear of an RMSNorm or LayerNorm, as one op with one autograd node and the bits of both ops. In formats with
// block scales one pass computes and quantizes the norm, whose values are never in memory.
#include <ATen/ops/empty.h>

#include <functional>

#include "common/autograd.h"
#include "common/ops/gemm.h"
#include "common/ops/linear.h"
#include "common/register.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/ops/calls.h"
#include "gemm/ops/leading_dims.h"
#include "linear/calls.h"
#include "linear/nonfinite.h"
#include "linear/products.h"
#include "linear/quantized_weight.h"
#include "linear/sharded_weight.h"
#include "linear/weight_source.h"
#include "linear/wgrad_destination.h"
#include "norm/calls.h"

namespace transformer_plugin::linear {

using namespace gemm;  // layers are made of its ops and checks
namespace {

using at::Tensor;
using norm::NormCall;
using norm::Stats;
using OptionalTensor = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "norm_linear";
const OptionalTensor kNone;

struct NormLinear {
  NormCall norm;         // its input is [..., K]; a matrix below check_norm_linear
  const Tensor& weight;  // [N, K]
  const OptionalTensor& bias;
  const OptionalList& quantized_weight;
  bool return_normalized;
  MainGrad main_grad = {};
  const sharded::WeightShard& shard = sharded::kUnsharded;
};

bool is_centered(std::string_view normalization) {
  TP_CHECK_VALUE(normalization == "rms_norm" || normalization == "layer_norm", kOp, "normalization",
                 "'rms_norm' or 'layer_norm'", "'" << normalization << "'", "Use one of the two");
  return normalization == "layer_norm";
}

void check_norm_linear(const NormLinear& layer, const OperandFormats& formats) {
  const NormCall& norm = layer.norm;
  const Argument input{kOp, "input", norm.input}, weight{kOp, "weight", layer.weight};
  const WeightArgument weights{kOp, "weight", layer.weight};
  TP_CHECK_VALUE(norm.centered || !norm.bias, kOp, "norm_bias", "None with rms_norm, which has no bias",
                 describe(*norm.bias), "Leave it out, or use layer_norm");
  norm::check_norm(norm, "norm_weight", "norm_bias");
  check_pair(weight, input, 2);
  check_size(weight, 1, norm.input.sym_size(-1), "the last dimension of 'input'");
  if (layer.bias)
    check_bias({kOp, "bias", *layer.bias}, input, std::nullopt, unsharded_size(layer.weight, layer.shard));
  check_weight_shard(weights, layer.shard, layer.main_grad);
  check_layer_widths(input, weights, unsharded_size(layer.weight, layer.shard), formats);
  check_quantized_weight("quantized_weight", layer.quantized_weight, weights, formats);
  check_weight_gradient(layer.main_grad, weights, false, norm.input);
  if (!layer.main_grad.buffers) return;
  CallMemory memory(kOp);
  memory.written("main_grad", layer.main_grad.buffers);
  memory.read("input", norm.input);
  memory.read("norm_weight", norm.weight);
  memory.read("norm_bias", norm.bias);
  memory.read("weight", layer.weight);
  memory.read("bias", layer.bias);
  memory.read("quantized_weight", layer.quantized_weight);
  memory.check();
}

// Block scales along rows are found in registers. Without the values in memory there is nothing to return, and no factor that
// marks NaN and infinities. fp8_tensor and nvfp4 need the amax of the whole matrix first, and scales of whole rows have no such op.
bool fuses_quantize(const NormLinear& layer, const OperandFormats& formats) {
  const Format& format = formats.input;
  return format.has_blocks() && !format.is_nv() && !format.square_blocks &&
         !marks_nonfinite(formats.input_key) && !layer.return_normalized;
}

// The columnwise operand of the weight gradient is not kept from the forward. The backward computes the norm again from the
// input, which the gradient of the norm needs in any case, and quantizes it columnwise: a pass over the input, and one byte for
// each element less in FP8, two with 16 bits. Stochastic rounding keeps it, as one seed serves both directions.
bool keeps_columns(const OperandFormats& formats) { return formats.input.stochastic_rounding; }

// Columnwise only.
Quantized weight_gradient_operand(const Tensor& normalized, const OptionalTensor& sizes,
                                  const OperandFormats& formats) {
  return quantize_operand(normalized, sizes, formats.input, formats.input_key, false, true).columnwise;
}

struct NeedsGrad {
  bool normalized = false;  // for a gradient of the input or of a parameter of the norm
  bool weight = false;
};
struct SavedTensors {
  Stats stats;
  Quantized columns;  // of the normalized input, if keeps_columns
  Quantized weight;   // for the data gradient
};

struct Outputs {
  Tensor output, normalized;  // [T, N] and [T, K], the latter if requested
};
// The order of the steps is the order in which stochastic rounding draws its seeds.
Outputs forward_of(const NormLinear& layer, const OperandFormats& formats, const NeedsGrad& needs_grad,
                   SavedTensors& kept) {
  const BelowAutograd guard;
  Tensor normalized;
  QuantizedOperand input;
  if (fuses_quantize(layer, formats)) {
    norm::NormInBlocks blocks = norm::call_norm_quantize(layer.norm, formats.input_key);
    kept.stats = blocks.stats;
    input.rowwise = {blocks.data, blocks.scale, Tensor(), formats.input, formats.input_key};
  } else {
    if (needs_grad.normalized) {
      norm::NormWithStats made = norm::call_norm_forward(layer.norm);
      normalized = std::move(made.output);
      kept.stats = std::move(made.stats);
    } else {
      normalized = norm::call_norm(layer.norm);
    }
    const bool columns = needs_grad.weight && keeps_columns(formats);
    input = formats.unquantized()
                ? QuantizedOperand{{normalized, Tensor(), Tensor()}, {}}
                : quantize_operand(normalized, kNone, formats.input, formats.input_key, true, columns);
    if (columns) kept.columns = std::move(input.columnwise);
  }
  input.columnwise = {};
  if (!layer.return_normalized) normalized.reset();
  const WeightSource source{layer.weight, layer.quantized_weight, layer.shard};
  const QuantizedWeight weight = source.for_forward(formats, needs_grad.normalized);
  kept.weight = weight.backward;
  return {gemm_of({.a = input.rowwise,
                   .b = weight.forward,
                   .bias = layer.bias,
                   .dtype = layer.norm.input.scalar_type()}),
          normalized};
}

// Which gradients of the linear layer are needed, and these; `input` is that of the normalized values. `weight`: null if not.
struct LayerNeedsGrad {
  bool input;
  WgradDestination* weight;
  bool bias;
};
struct LayerGradients {
  Tensor input, bias;
  variable_list weight;
};
using UnshardedWeight = std::function<Quantized()>;  // as the data gradient reads it
LayerGradients unquantized_gradients(const Tensor& grad, const NormCall& norm, const UnshardedWeight& weight,
                                     const LayerNeedsGrad& needs_grad) {
  LayerGradients result;
  if (needs_grad.weight) {
    const Tensor normalized = norm::call_norm(norm);
    if (needs_grad.weight->allocates()) {
      result.weight = {call_gemm(grad.t(), normalized, kNone, false, grad.scalar_type())};
    } else {
      const Quantized g{grad, Tensor(), Tensor()}, x{normalized, Tensor(), Tensor()};
      result.weight = needs_grad.weight->compute({g, x, std::nullopt, grad.scalar_type()});
    }
  }
  if (needs_grad.input) result.input = call_gemm(grad, weight().data, kNone, false, grad.scalar_type());
  if (needs_grad.bias) result.bias = ops::bias_backward(grad);
  return result;
}

// The weight gradient first, whose operands are then freed.
LayerGradients quantized_gradients(const Tensor& grad, const NormCall& norm, SavedTensors kept,
                                   const UnshardedWeight& weight, const OperandFormats& formats,
                                   const LayerNeedsGrad& needs_grad) {
  LayerGradients result;
  const bool needs_weight_grad = needs_grad.weight != nullptr;
  if (needs_grad.input || needs_weight_grad) {
    const OptionalTensor sizes = needs_weight_grad ? column_groups(grad, kNone, formats) : kNone;
    QuantizedGradient g = quantize_gradient(grad, sizes, formats.grad, formats.grad_key, needs_grad.input,
                                            needs_weight_grad, needs_grad.bias);
    result.bias = std::move(g.bias);
    if (needs_weight_grad) {
      if (!kept.columns.data.defined()) {
        kept.columns = weight_gradient_operand(norm::call_norm(norm), sizes, formats);
      }
      result.weight =
          needs_grad.weight->compute({g.values.columnwise, kept.columns, sizes, grad.scalar_type()});
      g.values.columnwise = kept.columns = {};
    }
    if (needs_grad.input) {
      const Quantized w = weight();
      result.input =
          gemm_of({.a = g.values.rowwise, .b = w, .transpose_b = w.transposed, .dtype = grad.scalar_type()});
    }
    if (sizes && result.bias.defined()) result.bias = result.bias.squeeze(0);
  }
  if (needs_grad.bias && !result.bias.defined()) result.bias = ops::bias_backward(grad);
  return result;
}

class NormLinearFunction : public DifferentiableOnce<NormLinearFunction> {
 public:
  static constexpr const char* kName = "norm_linear";
  static constexpr bool is_traceable = true;

  // The tensors are those of `layer`, which torch looks for among the arguments.
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const OptionalTensor& norm_weight,
                        const OptionalTensor& norm_bias, const Tensor& weight, const OptionalTensor& bias,
                        const NormLinear& layer, const OperandFormats& formats) {
    const NeedsGrad needs_grad{
        input.requires_grad() || requires_grad(norm_weight) || requires_grad(norm_bias),
        weight.requires_grad()};
    SavedTensors kept;
    const Tensor output = forward_of(layer, formats, needs_grad, kept).output;
    const bool norms_again = needs_grad.weight && !kept.columns.data.defined();
    const bool keeps_input = needs_grad.normalized || norms_again;
    if (!needs_grad.normalized) kept.stats = {};
    ctx->save_for_backward({keeps_input ? input : Tensor(),
                            keeps_input ? or_undefined(norm_weight) : Tensor(),
                            norms_again ? or_undefined(norm_bias) : Tensor(), kept.stats.mean,
                            kept.stats.rstd, kept.columns.data, kept.columns.scale, kept.columns.amax,
                            kept.weight.data, kept.weight.scale, kept.weight.amax});
    if (needs_grad.weight) save_wgrad_destination(ctx, "main_grad", layer.main_grad, weight, layer.shard);
    save_weight_shard(ctx, layer.shard);
    ctx->saved_data["eps"] = layer.norm.eps;
    ctx->saved_data["centered"] = layer.norm.centered;
    ctx->saved_data["zero_centered"] = layer.norm.zero_centered;
    ctx->saved_data["input_format"] = std::string(formats.input_key);
    ctx->saved_data["weight_format"] = std::string(formats.weight_key);
    ctx->saved_data["grad_format"] = std::string(formats.grad_key);
    ctx->saved_data["weight_columns"] = kept.weight.transposed;
    ctx->saved_data["has_norm_weight"] = norm_weight.has_value();
    ctx->saved_data["has_norm_bias"] = norm_bias.has_value();
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->set_materialize_grads(false);
    return output;
  }

  // Which of the differentiable arguments need a gradient; those that are not given do not.
  struct NeedsInputGrad {
    bool input, norm_weight, norm_bias, weight, bias;
    size_t place_of_weight;

    explicit NeedsInputGrad(AutogradContext* ctx) {
      size_t place = 0;  // torch counts the tensors that are given
      const auto next = [&](const char* name) {
        return (!name || ctx->saved_data[name].toBool()) && ctx->needs_input_grad(place++);
      };
      input = next(nullptr);
      norm_weight = next("has_norm_weight");
      norm_bias = next("has_norm_bias");
      place_of_weight = place;
      weight = next(nullptr);
      bias = next("has_bias");
    }
    bool normalized() const { return input || norm_weight || norm_bias; }
  };

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const OptionalTensor norm_weight = as_optional(saved[1]), norm_bias = as_optional(saved[2]);
    const NormCall norm{kOp,
                        ctx->saved_data["centered"].toBool(),
                        saved[0],
                        norm_weight,
                        norm_bias,
                        ctx->saved_data["eps"].toDouble(),
                        ctx->saved_data["zero_centered"].toBool()};
    const Stats stats{saved[3], saved[4]};
    const NeedsInputGrad needs_grad(ctx);
    variable_list result(7);
    if (!grads[0].defined()) return result;
    const sharded::WeightShard shard = saved_weight_shard(ctx);
    const auto weight = wgrad_destination({ctx, needs_grad.place_of_weight, 1, false}, "main_grad", shard);
    LayerGradients layer = gradients_of_layer(ctx, grads[0], norm, saved, shard,
                                              {needs_grad.normalized(), weight.get(), needs_grad.bias});
    if (weight) weight->finish(layer.weight, layer.input);
    if (weight) result[3] = std::move(layer.weight[0]);
    result[4] = std::move(layer.bias);
    if (!needs_grad.normalized()) return result;
    auto [input, of_weight, of_bias] =
        norm::call_norm_backward(layer.input, norm, stats, needs_grad.norm_bias);
    if (needs_grad.input) result[0] = std::move(input);
    if (needs_grad.norm_weight) result[1] = std::move(of_weight);
    if (needs_grad.norm_bias) result[2] = std::move(of_bias);
    return result;
  }

  static LayerGradients gradients_of_layer(AutogradContext* ctx, const Tensor& grad, const NormCall& norm,
                                           const variable_list& saved, const sharded::WeightShard& shard,
                                           const LayerNeedsGrad& needs_grad) {
    const std::string input_key = ctx->saved_data["input_format"].toStringRef();
    const std::string weight_key = ctx->saved_data["weight_format"].toStringRef();
    const std::string grad_key = ctx->saved_data["grad_format"].toStringRef();
    const OperandFormats formats = operand_formats(kOp, input_key, weight_key, grad_key);
    const Quantized weight{saved[8],       saved[9],   saved[10],
                           formats.weight, weight_key, ctx->saved_data["weight_columns"].toBool()};
    const bool is_early = needs_grad.input && needs_grad.weight && needs_grad.weight->follows_unshard();
    const WeightSource source{{}, {}, shard};
    const Quantized early = is_early ? source.for_backward(weight, formats).values : Quantized{};
    if (!needs_grad.input) announce_use_in_backward(ctx, "main_grad", shard);
    const UnshardedWeight unsharded = [&] {
      return is_early ? early : source.for_backward(weight, formats).values;
    };
    if (formats.unquantized()) return unquantized_gradients(grad, norm, unsharded, needs_grad);
    const SavedTensors kept{{}, {saved[5], saved[6], saved[7], formats.input, input_key, true}, {}};
    return quantized_gradients(grad, norm, kept, unsharded, formats, needs_grad);
  }
};

using Two = std::tuple<Tensor, Tensor>;
// `like`: the input, [..., K]. The Autograd kernel calls this, where a tracer must see the empty tensor made.
Two shaped(const Tensor& output, const Tensor& normalized, const Tensor& like) {
  return {from_matrix(output, like),
          normalized.defined() ? from_matrix(normalized, like) : at::empty({0}, like.options())};
}

// Calls the op below autograd.
Two redispatch(const NormLinear& layer, std::string_view normalization, std::string_view input_format,
               std::string_view weight_format, std::string_view grad_format) {
  const BelowAutograd guard;
  const auto& [norm, weight, bias, quantized_weight, return_normalized, main_grad, shard] = layer;
  return ops::norm_linear(norm.input, norm.weight, norm.bias, weight, bias, norm.eps, normalization,
                          norm.zero_centered, return_normalized, input_format, weight_format, grad_format,
                          quantized_weight,
                          main_grad.buffers ? OptionalTensor((*main_grad.buffers)[0]) : std::nullopt,
                          main_grad.accumulate, main_grad.weight_grad, main_grad.queue, shard.key);
}

// With the norm as a second result two ops, so that a node with weights has one output with a gradient: torch's schedules that delay
// gradients of weights add up those of all outputs of such a node. Keeps no more than the norm, which the caller has too.
Two in_two_nodes(const NormLinear& layer, const OperandFormats& formats) {
  const Tensor normalized = norm::call_norm(layer.norm);
  return {call_linear(normalized, layer.weight, layer.bias, formats, layer.quantized_weight, layer.main_grad,
                      !formats.unquantized() && !formats.input.stochastic_rounding, layer.shard),
          normalized};
}

enum class Kernel { kCompute, kMeta, kAutograd };

template <Kernel kernel>
Two norm_linear(const Tensor& input, const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                const Tensor& weight, const OptionalTensor& bias, double eps, std::string_view normalization,
                bool zero_centered, bool return_normalized, std::string_view input_format,
                std::string_view weight_format, std::string_view grad_format, OptionalList quantized_weight,
                const OptionalTensor& main_grad, bool accumulate, std::string_view weight_grad,
                const OptionalTensor& wgrad_queue, std::string_view weight_shard) {
  const bool centered = is_centered(normalization);
  const sharded::WeightShard shard = sharded::parse_weight_shard(kOp, weight_shard);
  MainGrad target{{}, accumulate, weight_grad, wgrad_queue};
  if (main_grad) target.buffers = at::TensorList(*main_grad);
  const auto layer_of = [&](const Tensor& x) {
    const NormCall norm{kOp, centered, x, norm_weight, norm_bias, eps, zero_centered};
    return NormLinear{norm, weight, bias, quantized_weight, return_normalized, target, shard};
  };
  const bool records = any_requires_grad(input, norm_weight, norm_bias, weight, bias);
  if (kernel == Kernel::kAutograd && !records) {
    return redispatch(layer_of(input), normalization, input_format, weight_format, grad_format);
  }
  const OperandFormats formats = operand_formats(kOp, input_format, weight_format, grad_format);
  check_norm_linear(layer_of(input), formats);
  if constexpr (kernel == Kernel::kMeta) {
    return {empty(input, with_columns(input, unsharded_size(weight, shard)), input.scalar_type()),
            return_normalized ? empty(input, input.sym_sizes(), input.scalar_type())
                              : empty(input, {0}, input.scalar_type())};
  } else if constexpr (kernel == Kernel::kAutograd) {
    const Tensor x = as_matrix(input);
    check_quantizable(kOp, x, weight, kNone, formats, weight.requires_grad());
    if (return_normalized) return in_two_nodes(layer_of(input), formats);
    return shaped(NormLinearFunction::apply(x, norm_weight, norm_bias, weight, bias, layer_of(x), formats),
                  Tensor(), input);
  } else {
    const BelowAutograd guard;
    const Tensor x = as_matrix(input);
    check_quantizable(kOp, x, weight, kNone, formats, false);
    SavedTensors nothing;
    const Outputs outputs = forward_of(layer_of(x), formats, {}, nothing);
    return shaped(outputs.output, outputs.normalized, input);
  }
}

}  // namespace

TP_IMPL(norm_linear, norm_linear<Kernel::kCompute>, norm_linear<Kernel::kMeta>,
        norm_linear<Kernel::kAutograd>);

}  // namespace transformer_plugin::linear
