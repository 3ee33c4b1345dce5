#include "linear/quantized_linear.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <string>

#include "common/autograd.h"
#include "common/check.h"
#include "common/ops/gemm.h"
#include "common/shared_offsets.h"
#include "gemm/ops/calls.h"
#include "gemm/ops/leading_dims.h"
#include "linear/input_rows.h"
#include "linear/products.h"
#include "linear/sharded_weight.h"
#include "linear/weight_source.h"
#include "linear/wgrad_destination.h"
#include "quantize/ops/checks.h"
#include "quantize/ops/group_tables.h"

namespace transformer_plugin::linear {

using namespace gemm;  // layers are made of its ops and checks
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

}  // namespace

OptionalTensor column_groups(const Tensor& input, const OptionalTensor& group_sizes,
                             const OperandFormats& formats, int64_t ranks) {
  const bool blocks = formats.input.family == FormatFamily::kFp8Block && !formats.input.square_blocks &&
                      !formats.grad.square_blocks;
  if (group_sizes || !blocks || !input.sym_size(0).is_symbolic()) return group_sizes;
  return at::full_symint({1}, c10::Scalar(input.sym_size(0) * ranks), input.options().dtype(at::kLong));
}

namespace {

Tensor forward_gemm(const LinearArguments& layer, const OperandFormats& formats,
                    const QuantizedOperand& input, const QuantizedWeight& weight) {
  return gemm_of(input.rowwise, weight.forward, layer.group_sizes, layer.bias, layer.bias_scale, true,
                 layer.input.scalar_type(), layer.options, weight.matrices, layer.buffers.out);
}

template <bool is_grouped>
class QuantizedLinearFunction : public DifferentiableOnce<QuantizedLinearFunction<is_grouped>> {
 public:
  static constexpr const char* kName = is_grouped ? "grouped_linear" : "linear";
  static constexpr bool is_traceable = true;
  static constexpr const char* kMainGrad = "main_grad";
  static constexpr ptrdiff_t kSaved = 10;   // tensors saved before the matrices
  static constexpr size_t kArguments = 17;  // with the weight as one

  // Saves what it always needs, then the matrices of a weight without scales, or the parts of them.
  static Tensor forward(AutogradContext* ctx, const Tensor& input, at::TensorList weight,
                        const OptionalTensor& group_sizes, const OptionalTensor& bias,
                        const OptionalTensor& bias_scale, std::string_view input_key,
                        std::string_view weight_key, std::string_view grad_key,
                        const OptionalList& quantized_weight, int64_t max_sms, int64_t expected_rows,
                        const MainGrad& main_grad, const CallerBuffers& buffers, bool save_original_input,
                        int64_t num_ranks, std::string_view input_group, const sharded::WeightShard& shard) {
    const bool wants_input = input.requires_grad(), wants_weight = wants_grad(weight);
    const BelowAutograd guard;
    const OperandFormats formats = operand_formats("linear", input_key, weight_key, grad_key);
    const InputRanks ranks{num_ranks, input_group};
    const OptionalTensor column_sizes =
        wants_weight ? column_groups(input, group_sizes, formats, num_ranks) : group_sizes;
    const SharedOffsets shared(or_undefined(column_sizes));
    const bool keeps_original = keeps_input(save_original_input, ranks, formats);
    const bool columns_now = wants_weight && !keeps_original;
    const QuantizedOperand x =
        ranks.is_sharded()
            ? gathered_operand_of(input, ranks, column_sizes, formats.input, input_key, true, columns_now)
            : quantize_operand(input, column_sizes, formats.input, input_key, true, columns_now);
    const WeightSource source{weight, quantized_weight, shard};
    const QuantizedWeight w = source.for_forward(formats, wants_input);
    ctx->saved_data["weight_columns"] = w.backward.transposed;
    // The backward needs the columnwise input only.
    Quantized columns;
    if (wants_weight) columns = keeps_original ? Quantized{input, Tensor(), Tensor()} : x.columnwise;
    if (wants_weight && keeps_original) ctx->saved_data["original_input"] = true;
    variable_list saved{columns.data,
                        columns.scale,
                        columns.amax,
                        w.backward.data,
                        w.backward.scale,
                        w.backward.amax,
                        or_undefined(group_sizes),
                        wants_grad(bias_scale) ? *bias : Tensor(),
                        or_undefined(bias_scale),
                        or_undefined(column_sizes)};
    const std::vector<Tensor>& matrices = w.matrices_to_save();
    if (wants_input) saved.insert(saved.end(), matrices.begin(), matrices.end());
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["input_format"] = std::string(input_key);
    ctx->saved_data["weight_format"] = std::string(weight_key);
    ctx->saved_data["grad_format"] = std::string(grad_key);
    ctx->saved_data["has_bias"] = bias.has_value();
    if (ranks.is_sharded()) {
      ctx->saved_data["input_ranks"] = num_ranks;
      ctx->saved_data["input_group"] = std::string(input_group);
    }
    if (weight.size() > 1) ctx->saved_data["matrices"] = static_cast<int64_t>(weight.size());
    const LaunchOptions options{max_sms, expected_rows};
    save_options(ctx, options);
    if (wants_weight) save_wgrad_destination(ctx, kMainGrad, main_grad, weight, shard);
    save_weight_shard(ctx, shard);
    if (wants_input) save_dgrad_out(ctx, buffers);
    return forward_gemm({input, weight, group_sizes, bias, bias_scale, std::nullopt, options, {}, buffers},
                        formats, x, w);
  }

  static variable_list gradients(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const std::string input_key = ctx->saved_data["input_format"].toStringRef();
    const std::string weight_key = ctx->saved_data["weight_format"].toStringRef();
    const std::string grad_key = ctx->saved_data["grad_format"].toStringRef();
    const OperandFormats formats = operand_formats("linear", input_key, weight_key, grad_key);
    const bool weight_columns = ctx->saved_data["weight_columns"].toBool();
    const Quantized input{saved[0], saved[1], saved[2], formats.input, input_key, true},
        weight{saved[3], saved[4], saved[5], formats.weight, weight_key, weight_columns};
    const LaunchOptions options = saved_options(ctx);
    const OptionalTensor group_sizes = as_optional(saved[6]), column_sizes = as_optional(saved[9]);
    const SharedOffsets shared(saved[9]);
    const Tensor grad = as_matrix(grads[0]);  // that of a buffer may have more dimensions
    const size_t matrices = saved_matrices(ctx);
    const sharded::WeightShard shard = saved_weight_shard(ctx);
    const auto destination = wgrad_destination({ctx, 1, matrices, is_grouped}, kMainGrad, shard);
    const bool wants_input = ctx->needs_input_grad(0), wants_weight = destination != nullptr;
    const bool weight_first = wants_weight && destination->goes_first();
    const size_t place_of_bias = matrices + (group_sizes ? 2 : 1);
    const bool wants_bias = ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(place_of_bias);
    Tensor grad_input, grad_bias, grad_scale;
    variable_list grad_weight(matrices);
    if (wants_input || wants_weight) {
      const auto [g, bias] = quantize_gradient(grad, column_sizes, formats.grad, grad_key, wants_input,
                                               wants_weight, wants_bias && !saved[8].defined());
      grad_bias = bias;
      const auto compute_weight = [&,
                                   &g = g] {  // clang captures no structured binding under OpenMP otherwise
        grad_weight = destination->compute({g.columnwise, columnwise_input(ctx, input, column_sizes),
                                            column_sizes, grad.scalar_type(), options});
      };
      if (weight_first) compute_weight();
      if (wants_input) {
        const WeightSource source{at::TensorList(saved).slice(kSaved), {}, shard};
        const WeightForBackward w = source.for_backward(weight, formats);
        grad_input = as_matrix(gemm_of(g.rowwise, w.values, group_sizes, std::nullopt, std::nullopt,
                                       w.values.transposed, grad.scalar_type(), options, w.matrices(),
                                       saved_dgrad_out(ctx, QuantizedLinearFunction::kName, grad)));
        const InputRanks ranks = saved_ranks(ctx);
        if (ranks.is_sharded()) grad_input = reduce_scatter_rows(grad_input, ranks);
      } else {
        announce_use_in_backward(ctx, kMainGrad, shard);
      }
      if (wants_weight && !weight_first) compute_weight();
      if (wants_weight) destination->finish(grad_weight, grad_input);
      if (grad_bias.defined() && column_sizes && !group_sizes) grad_bias = grad_bias.squeeze(0);
    }
    if (!grad_bias.defined()) {
      std::tie(grad_bias, grad_scale) =
          bias_gradients_of(ctx, grad, group_sizes, saved[7], saved[8], place_of_bias);
    }
    variable_list result{grad_input};
    result.insert(result.end(), grad_weight.begin(), grad_weight.end());
    result.resize(matrices + kArguments - 1);
    result[matrices + 2] = grad_bias;
    result[matrices + 3] = grad_scale;
    return result;
  }

  static bool keeps_input(bool save_original_input, const InputRanks& ranks, const OperandFormats& formats) {
    if (ranks.is_sharded()) return !formats.input.stochastic_rounding;  // which would draw other numbers
    return save_original_input && !formats.native();
  }

  static InputRanks saved_ranks(AutogradContext* ctx) {
    const auto ranks = ctx->saved_data.find("input_ranks");
    if (ranks == ctx->saved_data.end()) return {};
    return {ranks->second.toInt(), ctx->saved_data["input_group"].toStringRef()};
  }

  // Quantizes an original input: columnwise, where the rowwise operand was not kept.
  static Quantized columnwise_input(AutogradContext* ctx, const Quantized& saved,
                                    const OptionalTensor& column_sizes) {
    if (ctx->saved_data.find("original_input") == ctx->saved_data.end()) return saved;
    const InputRanks ranks = saved_ranks(ctx);
    const Tensor input = ranks.is_sharded() ? all_gather_rows(saved.data, ranks) : saved.data;
    return quantize_operand(input, column_sizes, saved.format, saved.key, false, true).columnwise;
  }

  static size_t saved_matrices(AutogradContext* ctx) {
    const auto matrices = ctx->saved_data.find("matrices");
    return matrices == ctx->saved_data.end() ? 1 : static_cast<size_t>(matrices->second.toInt());
  }

  // From the gradient before quantization.
  static std::pair<Tensor, Tensor> bias_gradients_of(AutogradContext* ctx, const Tensor& grad,
                                                     const OptionalTensor& group_sizes, const Tensor& bias,
                                                     const Tensor& bias_scale, size_t place) {
    const bool has_bias = ctx->saved_data["has_bias"].toBool();
    if (group_sizes) return bias_gradients(ctx, has_bias, grad, *group_sizes, bias, bias_scale, place);
    if (!has_bias || !ctx->needs_input_grad(place)) return {};
    return {ops::bias_backward(grad), Tensor()};
  }
};

void check_family(const char* op, const char* argument, const Format& format, std::string_view key,
                  const OperandFormats& formats) {
  TP_CHECK_VALUE(format.family == formats.input.family, op, argument,
                 "a format of the family of input_format, '" << formats.input_key << "'", "'" << key << "'",
                 "Use the three formats of one recipe");
}

// FP8 tensor cores have the second operand in E4M3 where rows of both have scales.
void check_row_scaled_weight(const char* op, const OperandFormats& formats) {
  TP_CHECK_VALUE(!formats.weight.traits().has_row_scales || formats.weight.element == DType::kFloat8E4M3, op,
                 "weight_format", formats.weight.traits().name << " with e4m3",
                 "'" << formats.weight_key << "'", "Quantize the weight to e4m3");
}

// A random Hadamard transform applies to both operands of the weight gradient, where it cancels, and to nothing else.
void check_rotations(const char* op, const OperandFormats& formats) {
  TP_CHECK_VALUE(!formats.weight.random_hadamard, op, "weight_format",
                 "no 'rht', which only the other two formats may have together",
                 "'" << formats.weight_key << "'", "Use the three formats of one recipe");
  TP_CHECK_VALUE(formats.grad.random_hadamard == formats.input.random_hadamard, op, "grad_format",
                 "'rht' if and only if input_format, '" << formats.input_key << "', has it",
                 "'" << formats.grad_key << "'", "Use the three formats of one recipe");
}

// Of dimension `dim`, which has `size` elements.
void check_width(const Argument& argument, int64_t dim, const c10::SymInt& size,
                 const OperandFormats& formats, const char* advice) {
  const int64_t block =
      std::max({formats.input.block_size(), formats.weight.block_size(), formats.grad.block_size()});
  const std::string which = dim == -1 ? "a last dimension" : "a dimension " + std::to_string(dim);
  TP_CHECK_VALUE(size % block == 0, argument.op, argument.name,
                 which << " that is a multiple of " << block << ", the block of "
                       << (formats.input.is_nv() ? "nvfp4" : "mxfp8"),
                 describe(argument.tensor), advice);
}

}  // namespace

void check_block_width(const Argument& argument, int64_t dim, const OperandFormats& formats,
                       const char* advice) {
  check_width(argument, dim, argument.tensor.sym_size(dim), formats, advice);
}

OperandFormats operand_formats(const char* op, std::string_view input, std::string_view weight,
                               std::string_view grad) {
  if (input == "none" && weight == "none" && grad == "none") return {input, weight, grad, {}, {}, {}};
  const OperandFormats formats{input,
                               weight,
                               grad,
                               parse_format(op, "input_format", input),
                               parse_format(op, "weight_format", weight),
                               parse_format(op, "grad_format", grad)};
  check_family(op, "weight_format", formats.weight, weight, formats);
  check_family(op, "grad_format", formats.grad, grad, formats);
  check_rotations(op, formats);
  check_row_scaled_weight(op, formats);
  return formats;
}

void check_layer_widths(const Argument& input, const WeightArgument& weight, const c10::SymInt& rows,
                        const OperandFormats& formats) {
  check_block_width(input, -1, formats, "Pad it with zeros, for example with torch.nn.functional.pad");
  const std::string name = weight.first_name();
  check_width({weight.op, name.c_str(), weight.first()}, weight.first().dim() - 2, rows, formats,
              "Pad the weight with rows of zeros, and drop those columns of the output");
}

void check_ragged_formats(const char* op, const OperandFormats& formats) {
  const auto check_rows = [&](const char* name, const auto& format, const auto& key) {
    TP_CHECK_VALUE(!format.square_blocks, op, name, "blocks along rows, which end where a group ends",
                   "'" << key << "'", "Square blocks are for the weight");
  };
  check_rows("input_format", formats.input, formats.input_key);
  check_rows("grad_format", formats.grad, formats.grad_key);
}

void check_save_original_input(const char* op, bool save, const OperandFormats& formats) {
  TP_CHECK_VALUE(!save || !formats.input.stochastic_rounding, op, "save_original_input",
                 "False with stochastic rounding of the input, whose backward would draw other numbers",
                 "True with input_format '" << formats.input_key << "'",
                 "Leave it out, or round the input to nearest");
}

void check_quantizable(const char* op, const LinearArguments& layer, const OperandFormats& formats,
                       bool columns) {
  const Argument input{op, "input", layer.input};
  const Tensor* group_sizes = layer.group_sizes ? &*layer.group_sizes : nullptr;
  int64_t multiple = 1;
  if (formats.input.is_quantized()) {
    const bool quantizes_columns = columns && formats.input.traits().has_group_columns;
    quantize::check_matrix(input, group_sizes, formats.input, quantizes_columns);
    quantize::check_matrix({op, "weight", layer.weight[0]}, nullptr, formats.weight);
    multiple = quantize::group_multiple(formats.input, quantizes_columns);
  }
  if (group_sizes) quantize::check_group_values(input, *group_sizes, multiple);
}

Tensor quantized_linear_forward(const LinearArguments& layer, const OperandFormats& formats) {
  const SharedOffsets shared(or_undefined(layer.group_sizes));
  const QuantizedOperand input =
      layer.input_ranks.is_sharded()
          ? gathered_operand_of(layer.input, layer.input_ranks, std::nullopt, formats.input,
                                formats.input_key, true, false)
          : quantize_operand(layer.input, layer.group_sizes, formats.input, formats.input_key, true, false);
  const WeightSource source{layer.weight, layer.quantized_weight, layer.shard};
  return forward_gemm(layer, formats, input, source.for_forward(formats, false));
}

template <bool is_grouped>
Tensor apply_quantized_linear(const LinearArguments& layer, const OperandFormats& formats) {
  return QuantizedLinearFunction<is_grouped>::apply(
      layer.input, layer.weight, layer.group_sizes, layer.bias, layer.bias_scale, formats.input_key,
      formats.weight_key, formats.grad_key, layer.quantized_weight, layer.options.max_sms,
      layer.options.expected_rows, layer.main_grad, layer.buffers, layer.save_original_input,
      layer.input_ranks.ranks, layer.input_ranks.group, layer.shard);
}

Tensor quantized_linear_autograd(const LinearArguments& layer, const OperandFormats& formats) {
  return layer.group_sizes ? apply_quantized_linear<true>(layer, formats)
                           : apply_quantized_linear<false>(layer, formats);
}

}  // namespace transformer_plugin::linear
