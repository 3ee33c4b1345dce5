#include "linear/grouped_mlp_checks.h"

#include "activation/activation_checks.h"
#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/row_index.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "linear/deferred_wgrad.h"
#include "linear/main_grad.h"
#include "linear/quantized_weight.h"
#include "linear/sharded_weight.h"
#include "quantize/ops/checks.h"
#include "quantize/ops/group_tables.h"

namespace transformer_plugin::linear {

using namespace gemm;  // layers are made of its ops and checks
namespace {

using at::Tensor;

void check_widths(const Argument& input, const Argument& fc2_weight, const OperandFormats& formats,
                  bool gated) {
  check_block_width(input, -1, formats, "Pad it with zeros, for example with torch.nn.functional.pad");
  check_block_width(
      fc2_weight, -1, formats,
      gated ? "Pad the weights with zeros, both halves of the first" : "Pad the weights with zeros");
}

// What buffers may not share memory with, besides each other.
void check_memory(const MlpArguments& mlp) {
  if (!mlp.fc1_main_grad.buffers && !mlp.fc2_main_grad.buffers && !mlp.buffers.given()) return;
  CallMemory memory(mlp.op);
  memory.written("fc1_main_grad", mlp.fc1_main_grad.buffers);
  memory.written("fc2_main_grad", mlp.fc2_main_grad.buffers);
  mlp.buffers.add_to(memory);
  memory.read("input", mlp.input);
  memory.read("fc1_weight", mlp.fc1_weight);
  memory.read("fc2_weight", mlp.fc2_weight);
  memory.read("group_sizes", mlp.group_sizes);
  memory.read("probs", mlp.probs);
  memory.read("fc1_bias", mlp.fc1_bias);
  memory.read("fc2_bias", mlp.fc2_bias);
  memory.read("quantized_fc1_weight", mlp.quantized_fc1);
  memory.read("quantized_fc2_weight", mlp.quantized_fc2);
  memory.read("slot", as_optional(mlp.rows.slot));
  memory.read("source", as_optional(mlp.rows.source));
  memory.read("received", as_optional(mlp.ranks.received));
  memory.read("position", as_optional(mlp.ranks.position));
  memory.check();
}

void check_main_grads(const MlpArguments& mlp, const WeightArgument& fc1_weight,
                      const WeightArgument& fc2_weight) {
  const bool given = mlp.fc1_main_grad.buffers || mlp.fc2_main_grad.buffers;
  check_main_grad_options(mlp.op, given, mlp.fc1_main_grad);
  check_wgrad_queue(mlp.op, "fc1_wgrad_queue", mlp.fc1_main_grad.queue, mlp.input);
  check_wgrad_queue(mlp.op, "fc2_wgrad_queue", mlp.fc2_main_grad.queue, mlp.input);
  check_main_grad("fc1_main_grad", mlp.fc1_main_grad, fc1_weight, true);
  check_main_grad("fc2_main_grad", mlp.fc2_main_grad, fc2_weight, true);
}

}  // namespace

OperandFormats check_grouped_mlp(const MlpArguments& mlp, std::string_view input_format,
                                 std::string_view weight_format, std::string_view grad_format) {
  const OperandFormats formats = operand_formats(mlp.op, input_format, weight_format, grad_format);
  const Argument input{mlp.op, "input", mlp.input}, probs{mlp.op, "probs", mlp.probs};
  const WeightArgument fc1_weight{mlp.op, "fc1_weight", mlp.fc1_weight};
  const WeightArgument fc2_weight{mlp.op, "fc2_weight", mlp.fc2_weight};
  check_dtype(input, kFloatTypes);
  check_dim(input, 2);
  check_token_rows(input, mlp.rows);
  mlp.ranks.check(input, probs, mlp.rows);
  if (mlp.rows.given() && !mlp.ranks.given()) {
    check_size({mlp.op, "slot", mlp.rows.slot}, 0, mlp.input.sym_size(0), "the rows of 'input'");
  }
  check_grouped_weight(fc1_weight, input);
  check_weight_size(fc1_weight, 2, mlp.input.sym_size(1), "the columns of 'input'");
  const c10::SymInt groups = fc1_weight.groups(), linear = fc1_weight.rows();
  const bool gated = mlp.activation.traits().gated;
  TP_CHECK_VALUE(!gated || linear % 2 == 0, mlp.op, fc1_weight.name,
                 "an even number of rows (gate and linear halves) in each group",
                 describe(fc1_weight.first()), "Concatenate the two halves along dimension 1");
  check_grouped_weight(fc2_weight, input);
  check_weight_size(fc2_weight, 0, groups, "the groups of 'fc1_weight'");
  check_weight_size(fc2_weight, 1, mlp.input.sym_size(1), "the columns of 'input'");
  const c10::SymInt features = linear / mlp.activation.columns_per_feature();
  check_weight_size(
      fc2_weight, 2, features,
      gated ? "half the rows of 'fc1_weight' in a group" : "the rows of 'fc1_weight' in a group");
  const c10::SymInt all_groups =
      fc1_weight.is_list() ? groups : unsharded_size(fc1_weight.first(), mlp.shard);
  check_groups({mlp.op, "group_sizes", mlp.group_sizes}, input, fc1_weight.name, all_groups);
  if (!mlp.ranks.given()) {
    activation::check_probs(probs, {mlp.op, "input", mlp.sized_as_rows()},
                            mlp.rows.given() ? "the entries of 'source'" : "the rows of 'input'");
  }
  if (mlp.fc1_bias) check_bias({mlp.op, "fc1_bias", *mlp.fc1_bias}, input, all_groups, linear);
  if (mlp.fc2_bias) check_bias({mlp.op, "fc2_bias", *mlp.fc2_bias}, input, all_groups, fc2_weight.rows());
  const std::string fc1_name = fc1_weight.first_name(), fc2_name = fc2_weight.first_name();
  activation::check_interleave({mlp.op, fc1_name.c_str(), fc1_weight.first()}, features, mlp.activation);
  check_launch_options(mlp.op, mlp.options);
  check_ragged_formats(mlp.op, formats);
  check_widths(input, {mlp.op, fc2_name.c_str(), fc2_weight.first()}, formats, gated);
  check_quantized_weight("quantized_fc1_weight", mlp.quantized_fc1, fc1_weight, formats);
  check_quantized_weight("quantized_fc2_weight", mlp.quantized_fc2, fc2_weight, formats);
  check_main_grads(mlp, fc1_weight, fc2_weight);
  TP_CHECK_VALUE(!mlp.shard.is_list, mlp.op, "weight_shard",
                 "no 'list': the matrices of both weights have different rows", "'" << mlp.shard.key << "'",
                 "Call grouped_linear for each weight");
  TP_CHECK_VALUE(!mlp.shard.is_external(), mlp.op, "weight_shard",
                 "a key without 'handle', which stands for one weight", "'" << mlp.shard.key << "'",
                 "Call grouped_linear for each weight");
  check_weight_shard(fc1_weight, mlp.shard, mlp.fc1_main_grad);
  check_weight_shard(fc2_weight, mlp.shard, mlp.fc2_main_grad);
  check_caller_buffers(input, mlp.input.sym_size(1), mlp.buffers);
  check_memory(mlp);
  return formats;
}

namespace {

// On a CPU, that the rows of the groups are tokens.
void check_sources(const MlpArguments& mlp) {
  const Tensor& rows = mlp.rows.source;
  if (!has_memory(mlp.input) || !has_memory(rows) || !rows.is_cpu()) return;
  const Argument source{mlp.op, "source", rows};
  check_row_entries(source, {mlp.op, "input", mlp.input},
                    group_offsets({mlp.op, "group_sizes", mlp.group_sizes}, source, rows.size(0)));
}

}  // namespace

// Both GEMMs have the same rows in the same groups, so one check serves them.
void check_quantizable(const MlpArguments& mlp, const OperandFormats& formats, bool columns) {
  if (mlp.rows.given()) check_sources(mlp);
  if (mlp.rows.given() && !formats.input.is_quantized()) {
    if (!has_memory(mlp.input) || !has_memory(mlp.rows.source)) return;
    const int64_t rows = mlp.rows.source.size(0);
    return quantize::check_group_values_of({mlp.op, "input", mlp.input}, rows, mlp.group_sizes, 1);
  }
  const std::optional<Tensor> sizes = mlp.group_sizes, none;
  // The sizes of the rows without their memory; by the dispatcher, for a tracer.
  const auto rows_of_tokens = [&] {
    const c10::SymInt columns_of_input = mlp.input.sym_size(1);
    return mlp.input.new_empty_symint({1, columns_of_input})
        .expand_symint({mlp.rows.source.sym_size(0), columns_of_input});
  };
  const Tensor rows = mlp.rows.given() ? rows_of_tokens() : mlp.input;
  check_quantizable(mlp.op, rows, mlp.fc1_weight[0], sizes, formats, columns);
  if (formats.input.is_quantized()) {
    quantize::check_matrix({mlp.op, "fc2_weight", mlp.fc2_weight[0]}, nullptr, formats.weight);
  }
}

}  // namespace transformer_plugin::linear
