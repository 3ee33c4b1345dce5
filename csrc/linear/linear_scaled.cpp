// linear_scaled and grouped_linear_scaled: linear and grouped_linear in fp8_tensor with delayed scaling. One state
// tensor holds the scales of the input (of each group), then of the weight, then of the gradient. Another one, if it is
// passed, collects amaxes, that of the gradient inside the backward.
#include <ATen/ops/mul.h>

#include "common/autograd.h"
#include "common/ops/gemm.h"
#include "common/ops/linear.h"
#include "common/register.h"
#include "common/shared_offsets.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/quantized_gemm.h"
#include "gemm/ops/calls.h"
#include "gemm/ops/leading_dims.h"
#include "linear/main_grad.h"
#include "linear/nonfinite.h"
#include "linear/products.h"
#include "linear/sharded_weight.h"
#include "linear/wgrad_destination.h"
#include "quantize/ops/calls.h"
#include "quantize/ops/checks.h"
#include "quantize/ops/group_tables.h"
#include "quantize/ops/scaled.h"
#include "sharded/gather_weight.h"

namespace transformer_plugin::linear {

using namespace gemm;  // layers are made of its ops and checks
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Keys {
  std::string_view input, weight, grad;
};

// input [M, K] and weight [N, K]; or, with group sizes, input [T, K] and weight [G, N, K]. The weight may be sharded over ranks:
// its values are gathered and quantized then, so that all ranks collect the same amax of it.
struct Layer {
  const char* op;
  const Tensor& input;
  const Tensor& weight;
  const OptionalTensor& group_sizes;
  const OptionalTensor& bias;
  const OptionalTensor& bias_scale;
  const Tensor& scale;
  const OptionalTensor& amax;
  const Keys& keys;
  LaunchOptions options;  // of the grouped GEMMs
  const sharded::WeightShard& shard;

  // The first dimension of the whole weight, and its rows.
  c10::SymInt size() const { return unsharded_size(weight, shard); }
  c10::SymInt rows() const { return weight.dim() == 3 ? weight.sym_size(-2) : size(); }
  // The index of a role's first scale; roles are 0 input, 1 weight, 2 gradient.
  int64_t first_of(int64_t role) const {
    return weight.dim() == 3 ? role * size().guard_int(__FILE__, __LINE__) : role;
  }
};

void check_shard(const Layer& layer) {
  const sharded::WeightShard& shard = layer.shard;
  if (!shard.is_sharded()) return;
  TP_CHECK_VALUE(!shard.each && !shard.is_external(), layer.op, "weight_shard",
                 "a key without 'each' and 'handle'", "'" << shard.key << "'",
                 "Use linear or grouped_linear, which compute scales from the data");
  check_weight_shard({layer.op, "weight", layer.weight}, shard, {});
}

// The largest magnitudes of plain operands are written before the product would refuse a subclass among the others.
void check_plain_beside_amax(const Layer& layer) {
  if (!layer.amax || is_traced(*layer.amax)) return;
  const auto check = [&](const char* name, const OptionalTensor& tensor) {
    TP_CHECK_VALUE(!tensor || !is_traced(*tensor), layer.op, name, "a plain tensor, as 'amax' is",
                   "a subclass " << describe(*tensor), "Pass the plain tensor that it has");
  };
  check("input", layer.input);
  check("weight", layer.weight);
  check("group_sizes", layer.group_sizes);
  check("bias", layer.bias);
  check("bias_scale", layer.bias_scale);
  check("scale", layer.scale);
}

void check_layer(const Layer& layer) {
  check_plain_beside_amax(layer);
  const Argument input{layer.op, "input", layer.input}, weight{layer.op, "weight", layer.weight};
  const bool grouped = layer.group_sizes.has_value();
  check_dtype(input, kFloatTypes);
  if (grouped) {
    check_dim(input, 2);
  } else {
    TP_CHECK_VALUE(layer.input.dim() > 0, layer.op, "input", "at least 1 dimension", describe(layer.input),
                   "Reshape it first");
  }
  check_pair(weight, input, grouped ? 3 : 2);
  check_size(weight, grouped ? 2 : 1, layer.input.sym_size(-1), "the last dimension of 'input'");
  check_shard(layer);
  const std::optional<c10::SymInt> groups = grouped ? std::optional<c10::SymInt>(layer.size()) : std::nullopt;
  if (grouped) check_groups({layer.op, "group_sizes", *layer.group_sizes}, input, "weight", *groups);
  if (layer.bias) check_bias({layer.op, "bias", *layer.bias}, input, groups, layer.rows());
  if (layer.bias_scale) {
    check_bias_scale({layer.op, "bias_scale", *layer.bias_scale}, layer.bias.has_value(), input);
  }
  const c10::SymInt count = groups ? *groups * 3 : c10::SymInt(3);
  const auto check_state = [&](const char* name, const Tensor& state) {
    const Argument argument{layer.op, name, state};
    quantize::check_scale_run(argument, input, 0, count);
    check_size(argument, 0, count, "those of input, weight and gradient, one for each group");
  };
  check_state("scale", layer.scale);
  if (layer.amax) {
    check_state("amax", *layer.amax);
    check_written({layer.op, "amax", *layer.amax});
  }
  check_launch_options(layer.op, layer.options);
  quantize::delayed_scaling_format(layer.op, "input_format", layer.keys.input);
  quantize::delayed_scaling_format(layer.op, "weight_format", layer.keys.weight);
  quantize::delayed_scaling_format(layer.op, "grad_format", layer.keys.grad);
}

Quantized quantize_role(const Tensor& x, const OptionalTensor& group_sizes, const Tensor& scale,
                        std::string_view key, const OptionalTensor& amax, int64_t first) {
  quantize::Outputs rounded =
      quantize::call_quantize_scaled(x, scale, key, amax, group_sizes, first, {true, false});
  Quantized result{std::move(rounded.data), std::move(rounded.scale), Tensor(), {}, key};
  if (marks_nonfinite(key)) result.scale = at::mul(result.scale, nonfinite_factor(x, group_sizes));
  return result;
}

// The transposed operand: a view, unless the FP8 kernels run, which need K-major data.
Quantized transposed_data(const Quantized& x, const OptionalTensor& group_sizes) {
  if (!has_quantized_kernels(x.data)) return {x.data.t(), x.scale, Tensor(), {}, x.key, true};
  Quantized result{Tensor(), Tensor(), Tensor(), {}, x.key, true};
  std::tie(result.data, result.scale) =
      quantize::call_requantize_transposed(x.data, x.scale, x.key, at::kFloat, group_sizes);
  return result;
}

struct Operands {
  Quantized input, weight;
};

// The whole weight.
Tensor gathered(const Tensor& weight, const sharded::WeightShard& shard, bool backward) {
  return shard.is_sharded() ? sharded::gather_values(weight, shard, backward) : weight;
}

Operands quantize_operands(const Layer& layer) {
  const OptionalTensor collects = quantize::runs_in_backward() ? std::nullopt : layer.amax;
  return {quantize_role(layer.input, layer.group_sizes, layer.scale, layer.keys.input, collects, 0),
          quantize_role(gathered(layer.weight, layer.shard, false), std::nullopt, layer.scale,
                        layer.keys.weight, collects, layer.first_of(1))};
}

Tensor forward_of(const Layer& layer, const Operands& operands) {
  return gemm_of(operands.input, operands.weight, layer.group_sizes, layer.bias, layer.bias_scale, true,
                 layer.input.scalar_type(), layer.options);
}

// The backward writes the amax but does not read it, so changes in between, such as DDP's broadcast of buffers, are no error. A
// tracer's tensor stays unchanged.
Tensor untracked_amax(const Tensor& amax) { return is_traced(amax) ? amax : amax.variable_data(); }

template <bool is_grouped>
class LinearScaledFunction : public DifferentiableOnce<LinearScaledFunction<is_grouped>> {
 public:
  static constexpr const char* kName = is_grouped ? "grouped_linear_scaled" : "linear_scaled";
  static constexpr bool is_traceable = true;
  static constexpr const char* kMainGrad = "main_grad";

  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& group_sizes, const OptionalTensor& bias,
                        const OptionalTensor& bias_scale, const Tensor& scale, const OptionalTensor& amax,
                        std::string_view input_key, std::string_view weight_key, std::string_view grad_key,
                        int64_t max_sms, int64_t expected_rows, const sharded::WeightShard& shard) {
    const bool wants_input = input.requires_grad(), wants_weight = weight.requires_grad();
    const BelowAutograd guard;
    const Keys keys{input_key, weight_key, grad_key};
    const LaunchOptions options{max_sms, expected_rows};
    const Layer layer{kName, input, weight, group_sizes, bias, bias_scale, scale, amax, keys, options, shard};
    save_options(ctx, options);
    const SharedOffsets shared(or_undefined(group_sizes));
    Operands operands = quantize_operands(layer);
    const Tensor none, output = forward_of(layer, operands);
    if (shard.is_sharded()) operands.weight = {weight, Tensor(), Tensor()};  // gathered again
    if (wants_weight) save_wgrad_destination(ctx, kMainGrad, {}, weight, shard);
    save_weight_shard(ctx, shard);
    ctx->save_for_backward(
        {wants_weight ? operands.input.data : none, wants_weight ? operands.input.scale : none,
         wants_input ? operands.weight.data : none, wants_input ? operands.weight.scale : none,
         or_undefined(group_sizes), wants_grad(bias_scale) ? *bias : none, or_undefined(bias_scale), scale,
         amax ? untracked_amax(*amax) : none});
    ctx->saved_data["input_format"] = std::string(input_key);
    ctx->saved_data["weight_format"] = std::string(weight_key);
    ctx->saved_data["grad_format"] = std::string(grad_key);
    ctx->saved_data["weight_dtype"] = weight.scalar_type();
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["first_of_weight"] = layer.first_of(1);
    ctx->saved_data["first"] = layer.first_of(2);
    return output;
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const std::string input_key = ctx->saved_data["input_format"].toStringRef();
    const std::string weight_key = ctx->saved_data["weight_format"].toStringRef();
    const std::string grad_key = ctx->saved_data["grad_format"].toStringRef();
    const OptionalTensor group_sizes = as_optional(saved[4]);
    const SharedOffsets shared(saved[4]);
    const Tensor& grad = grads[0];
    const bool wants_input = ctx->needs_input_grad(0);
    const sharded::WeightShard shard = saved_weight_shard(ctx);
    const auto destination = wgrad_destination({ctx, 1, 1, is_grouped}, kMainGrad, shard);
    const bool wants_weight = destination != nullptr,
               weight_first = wants_weight && destination->goes_first();
    Tensor grad_input;
    variable_list grad_weight(1);
    if (wants_input || wants_weight) {
      const Quantized g = quantize_role(grad, group_sizes, saved[7], grad_key, as_optional(saved[8]),
                                        ctx->saved_data["first"].toInt());
      const Quantized x{saved[0], saved[1], Tensor(), {}, input_key};
      const OptionalTensor none;
      const LaunchOptions options = saved_options(ctx);
      const auto compute_weight = [&] {
        grad_weight =
            destination->compute({transposed_data(g, group_sizes), transposed_data(x, group_sizes),
                                  group_sizes, ctx->saved_data["weight_dtype"].toScalarType(), options});
      };
      if (weight_first) compute_weight();
      if (wants_input) {
        const Quantized w = weight_of(ctx, saved, weight_key, shard);
        const bool k_major = has_quantized_kernels(w.data);
        grad_input = gemm_of(g, k_major ? transposed_data(w, none) : w, group_sizes, none, none, k_major,
                             grad.scalar_type(), options);
      }
      if (wants_weight && !weight_first) compute_weight();
      if (wants_weight) destination->finish(grad_weight, grad_input);
    }
    const auto [grad_bias, grad_bias_scale] = bias_gradients_of(ctx, grad, group_sizes, saved[5], saved[6]);
    return {grad_input, grad_weight[0], Tensor(), grad_bias, grad_bias_scale, Tensor(), Tensor(),
            Tensor(),   Tensor(),       Tensor(), Tensor(),  Tensor(),        Tensor()};
  }

  // As the forward had it.
  static Quantized weight_of(AutogradContext* ctx, const variable_list& saved, std::string_view key,
                             const sharded::WeightShard& shard) {
    if (!shard.is_sharded()) return {saved[2], saved[3], Tensor(), {}, key};
    return quantize_role(gathered(saved[2], shard, true), std::nullopt, saved[7], key, std::nullopt,
                         ctx->saved_data["first_of_weight"].toInt());
  }

  // From the gradient before quantization.
  static std::pair<Tensor, Tensor> bias_gradients_of(AutogradContext* ctx, const Tensor& grad,
                                                     const OptionalTensor& group_sizes, const Tensor& bias,
                                                     const Tensor& bias_scale) {
    const bool has_bias = ctx->saved_data["has_bias"].toBool();
    if (group_sizes) return bias_gradients(ctx, has_bias, grad, *group_sizes, bias, bias_scale);
    if (!has_bias || !ctx->needs_input_grad(2)) return {};
    return {ops::bias_backward(grad), Tensor()};
  }
};

// Refuses what the ops called below would refuse, and an amax that overlaps an operand, before anything is written to the amax.
void check_quantizable(const Layer& layer, const Tensor& x) {
  const Argument input{layer.op, "input", x};
  const Tensor* group_sizes = layer.group_sizes ? &*layer.group_sizes : nullptr;
  const Format format = quantize::delayed_scaling_format(layer.op, "input_format", layer.keys.input);
  quantize::check_matrix(input, group_sizes, format);
  quantize::check_matrix({layer.op, "weight", layer.weight}, nullptr, format);
  if (group_sizes) quantize::check_group_values(input, *group_sizes, 1);
  if (!layer.amax || !has_memory(*layer.amax) || !has_memory(layer.input)) return;
  check_apart(layer.op, {{"amax", layer.amax}},
              {{"input", layer.input},
               {"weight", layer.weight},
               {"group_sizes", layer.group_sizes},
               {"scale", layer.scale},
               {"bias", layer.bias},
               {"bias_scale", layer.bias_scale}});
}

Tensor run(const Layer& layer) {
  check_layer(layer);
  const BelowAutograd guard;
  const SharedOffsets shared(or_undefined(layer.group_sizes));
  const Tensor x = as_matrix(layer.input);
  check_quantizable(layer, x);
  const Layer flat{layer.op,    x,          layer.weight, layer.group_sizes, layer.bias, layer.bias_scale,
                   layer.scale, layer.amax, layer.keys,   layer.options,     layer.shard};
  return from_matrix(forward_of(flat, quantize_operands(flat)), layer.input);
}

Tensor meta(const Layer& layer) {
  check_layer(layer);
  return empty(layer.input, with_columns(layer.input, layer.rows()), layer.input.scalar_type());
}

template <bool is_grouped>
Tensor apply_scaled(const Layer& layer, const Tensor& x) {
  return LinearScaledFunction<is_grouped>::apply(x, layer.weight, layer.group_sizes, layer.bias,
                                                 layer.bias_scale, layer.scale, layer.amax, layer.keys.input,
                                                 layer.keys.weight, layer.keys.grad, layer.options.max_sms,
                                                 layer.options.expected_rows, layer.shard);
}

Tensor differentiable(const Layer& layer) {
  if (!any_wants_grad(layer.input, layer.weight, layer.bias, layer.bias_scale)) return run(layer);
  check_layer(layer);
  const Tensor x = as_matrix(layer.input);
  check_quantizable(layer, x);
  const auto apply = layer.group_sizes ? &apply_scaled<true> : &apply_scaled<false>;
  return from_matrix(apply(layer, x), layer.input);
}

using Key = c10::string_view;
using Optional = const OptionalTensor&;

template <Tensor (*run_op)(const Layer&)>
Tensor linear_scaled(const Tensor& input, const Tensor& weight, const Tensor& scale, Optional amax,
                     Optional bias, Key input_format, Key weight_format, Key grad_format, Key weight_shard) {
  const Keys keys{input_format, weight_format, grad_format};
  const sharded::WeightShard shard = sharded::parse_weight_shard("linear_scaled", weight_shard);
  return run_op(
      {"linear_scaled", input, weight, std::nullopt, bias, std::nullopt, scale, amax, keys, {}, shard});
}

template <Tensor (*run_op)(const Layer&)>
Tensor grouped_linear_scaled(const Tensor& input, const Tensor& weight, const Tensor& sizes,
                             const Tensor& scale, Optional amax, Optional bias, Optional bias_scale,
                             Key input_format, Key weight_format, Key grad_format, int64_t max_sms,
                             int64_t expected_rows, Key weight_shard) {
  const Keys keys{input_format, weight_format, grad_format};
  const sharded::WeightShard shard = sharded::parse_weight_shard("grouped_linear_scaled", weight_shard);
  return run_op({"grouped_linear_scaled", input, weight, sizes, bias, bias_scale, scale, amax, keys,
                 LaunchOptions{max_sms, expected_rows}, shard});
}

}  // namespace

TP_IMPL(linear_scaled, linear_scaled<run>, linear_scaled<meta>, linear_scaled<differentiable>);
TP_IMPL(grouped_linear_scaled, grouped_linear_scaled<run>, grouped_linear_scaled<meta>,
        grouped_linear_scaled<differentiable>);

}  // namespace transformer_plugin::linear
