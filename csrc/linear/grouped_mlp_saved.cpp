#include "linear/grouped_mlp_saved.h"

#include <string>

#include "activation/node.h"
#include "gemm/ops/calls.h"
#include "linear/saved_tensor_release.h"

namespace transformer_plugin::linear {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char *kFc1Matrices = "fc1_matrices", *kFc2Matrices = "fc2_matrices";
constexpr const char *kFc1Given = "fc1_given", *kFc2Given = "fc2_given";

// How many tensors a weight is, and whether they were saved; one and not is the common case.
void save_matrices(AutogradContext* ctx, const std::string& name, size_t count, size_t saved) {
  if (count > 1) ctx->saved_data[name] = static_cast<int64_t>(count);
  if (saved > 0) ctx->saved_data[name + "_saved"] = true;
}

bool is_saved(const AutogradContext* ctx, const std::string& name) {
  return ctx->saved_data.find(name) != ctx->saved_data.end();
}

size_t matrix_count(AutogradContext* ctx, const char* name) {
  const auto count = ctx->saved_data.find(name);
  return count == ctx->saved_data.end() ? 1 : static_cast<size_t>(count->second.toInt());
}

size_t saved_matrices(AutogradContext* ctx, const char* name) {
  return is_saved(ctx, std::string(name) + "_saved") ? matrix_count(ctx, name) : 0;
}

}  // namespace

std::array<Tensor*, SavedTensors::kBeforeMatrices> SavedTensors::before_matrices() {
  return {&input.data,      &input.scale, &input.amax,  &activation.data, &activation.scale,
          &activation.amax, &fc1.data,    &fc1.scale,   &fc1.amax,        &fc2.data,
          &fc2.scale,       &fc2.amax,    &fc1_out,     &group_sizes,     &probs,
          &fc2_bias,        &rows.slot,   &rows.source, &ranks.received,  &ranks.position};
}

variable_list SavedTensors::pack() {
  variable_list list;
  list.reserve(kBeforeMatrices + fc1_matrices.size() + fc2_matrices.size());
  for (const Tensor* tensor : before_matrices()) list.push_back(*tensor);
  list.insert(list.end(), fc1_matrices.begin(), fc1_matrices.end());
  list.insert(list.end(), fc2_matrices.begin(), fc2_matrices.end());
  return list;
}

SavedTensors SavedTensors::unpack(const variable_list& list, size_t fc1_count, size_t fc2_count) {
  SavedTensors saved;
  auto next = list.begin();
  for (Tensor* tensor : saved.before_matrices()) *tensor = *next++;
  const auto fc2_begin = next + static_cast<ptrdiff_t>(fc1_count);
  saved.fc1_matrices.assign(next, fc2_begin);
  saved.fc2_matrices.assign(fc2_begin, fc2_begin + static_cast<ptrdiff_t>(fc2_count));
  return saved;
}

void SavedTensors::save(AutogradContext* ctx, const MlpArguments& mlp, const OperandFormats& formats) {
  ctx->save_for_backward(pack());
  ranks.save(ctx);
  save_matrices(ctx, kFc1Matrices, mlp.fc1_weight.size(), fc1_matrices.size());
  save_matrices(ctx, kFc2Matrices, mlp.fc2_weight.size(), fc2_matrices.size());
  ctx->saved_data["input_format"] = std::string(formats.input_key);
  ctx->saved_data["weight_format"] = std::string(formats.weight_key);
  ctx->saved_data["grad_format"] = std::string(formats.grad_key);
  activation::save_key(ctx, mlp.activation.key);
  gemm::save_options(ctx, mlp.options);
  ctx->saved_data["fc1_columns"] = fc1.transposed;
  ctx->saved_data["fc2_columns"] = fc2.transposed;
  if (mlp.quantized_fc1) ctx->saved_data[kFc1Given] = true;
  if (mlp.quantized_fc2) ctx->saved_data[kFc2Given] = true;
  ctx->saved_data["has_fc1_bias"] = mlp.fc1_bias.has_value();
  ctx->saved_data["has_fc2_bias"] = mlp.fc2_bias.has_value();
  SavedTensorRelease::prepare(ctx);
}

SavedTensors SavedTensors::of(AutogradContext* ctx, const OperandFormats& formats) {
  SavedTensors saved = unpack(ctx->get_saved_variables(), saved_matrices(ctx, kFc1Matrices),
                              saved_matrices(ctx, kFc2Matrices));
  saved.ranks.restore(ctx);
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

OperandFormats saved_formats(AutogradContext* ctx, const char* op) {
  const auto key = [&](const char* name) -> std::string_view { return ctx->saved_data[name].toStringRef(); };
  return operand_formats(op, key("input_format"), key("weight_format"), key("grad_format"));
}

size_t saved_fc1_count(AutogradContext* ctx) { return matrix_count(ctx, kFc1Matrices); }
size_t saved_fc2_count(AutogradContext* ctx) { return matrix_count(ctx, kFc2Matrices); }

bool quantized_fc1_in_forward(AutogradContext* ctx, const SavedTensors& kept) {
  return kept.fc1.scale.defined() && !is_saved(ctx, kFc1Given);
}
bool quantized_fc2_in_forward(AutogradContext* ctx, const SavedTensors& kept) {
  return kept.fc2.scale.defined() && !is_saved(ctx, kFc2Given);
}

}  // namespace transformer_plugin::linear
