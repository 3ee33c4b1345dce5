#include "linear/main_grad.h"

#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "linear/deferred_wgrad.h"

namespace transformer_plugin::linear {

using at::Tensor;
using torch::autograd::AutogradContext;

namespace {

constexpr const char *kNone = "none", *kEmpty = "empty", *kZeros = "zeros";

std::string with_strides(const Tensor& tensor) {
  std::ostringstream text;
  text << describe(tensor);
  if (tensor.defined()) text << " with strides " << tensor.sym_strides();
  return text.str();
}

// What the buffers of a weight must fit.
struct Expected {
  at::TensorList buffers;
  const WeightArgument& weight;
  bool is_stack;  // [G, N, K]

  std::vector<c10::SymInt> sizes() const {
    std::vector<c10::SymInt> result{weight.rows(), weight.columns()};
    if (is_stack) result.insert(result.begin(), weight.groups());
    return result;
  }
};

void check_buffer(const Argument& buffer, const Expected& expected) {
  const Tensor &tensor = buffer.tensor, &weight = expected.weight.first();
  const bool is_double = weight.scalar_type() == at::kDouble;
  TP_CHECK_TYPE(tensor.defined(), buffer.op, buffer.name, "a tensor", "None", "Leave it out instead");
  check_strided(buffer);
  const at::ScalarType dtype = tensor.scalar_type();
  TP_CHECK_TYPE(is_double ? dtype == at::kDouble : dtype == at::kFloat || dtype == at::kBFloat16, buffer.op,
                buffer.name, (is_double ? "float64, as the weight" : "one of the dtypes float32, bfloat16"),
                with_strides(tensor), "Allocate it in one of them, which the gradient is rounded to");
  const std::vector<c10::SymInt> sizes = expected.sizes();
  TP_CHECK_VALUE(
      tensor.sym_sizes() == c10::SymIntArrayRef(sizes), buffer.op, buffer.name,
      "a tensor of the sizes " << c10::SymIntArrayRef(sizes) << " of '" << expected.weight.name << "'",
      with_strides(tensor), "Allocate it in the sizes of the weight, or pass a view of them");
  TP_CHECK_VALUE(tensor.device() == weight.device(), buffer.op, buffer.name,
                 "a tensor on " << weight.device() << ", as the weight", with_strides(tensor),
                 "Move it with .to(\"" << weight.device() << "\") first");
  TP_CHECK_VALUE(!tensor.requires_grad(), buffer.op, buffer.name, "a tensor with requires_grad=False",
                 with_strides(tensor) << " with requires_grad=True",
                 "It receives a gradient and has none: detach it");
}

// One tensor, or a matrix for each group.
void check_count(const char* name, const Expected& expected) {
  const WeightArgument& weight = expected.weight;
  const auto count = static_cast<int64_t>(expected.buffers.size());
  TP_CHECK_VALUE(expected.is_stack || weight.groups() == count, weight.op, name,
                 "one tensor of the groups, or a matrix for each of the " << weight.groups() << " groups",
                 count << " matrices, the first " << with_strides(expected.buffers[0]),
                 "Pass a buffer for each group");
}

}  // namespace

void check_main_grad_options(const char* op, bool has_buffers, const MainGrad& main_grad) {
  const std::string_view mode = main_grad.weight_grad;
  TP_CHECK_VALUE(mode == kNone || mode == kEmpty || mode == kZeros, op, "weight_grad",
                 "'none', 'empty' or 'zeros'", "'" << mode << "'", "Pass what autograd is to get");
  constexpr const char* advice = "Pass a buffer too, or leave it out";
  TP_CHECK_VALUE(has_buffers || mode == kNone, op, "weight_grad",
                 "'none' without a main_grad: autograd gets the gradient then", "'" << mode << "'", advice);
  TP_CHECK_VALUE(has_buffers || main_grad.accumulate, op, "accumulate",
                 "True without a main_grad, to which nothing is written then", "False", advice);
}

void check_main_grad(const char* name, const MainGrad& main_grad, const WeightArgument& weight,
                     bool is_grouped) {
  if (!main_grad.buffers) return;
  const at::TensorList buffers = *main_grad.buffers;
  TP_CHECK_VALUE(!buffers.empty(), weight.op, name, "one tensor, or a matrix for each group", "an empty list",
                 "Leave it out where there is no buffer");
  const bool single = buffers.size() == 1;
  const bool is_matrix =
      is_grouped && single && buffers[0].defined() && buffers[0].dim() == 2 && weight.groups() == 1;
  const Expected expected{buffers, weight, is_grouped && single && !is_matrix};
  if (is_grouped) check_count(name, expected);
  const std::string weight_name = weight.first_name();
  const Argument like{weight.op, weight_name.c_str(), weight.first()};
  for (size_t i = 0; i < buffers.size(); ++i) {
    const std::string own_name = single ? name : entry(name, i);
    check_buffer({weight.op, own_name.c_str(), buffers[i]}, expected);
    TP_CHECK_TYPE(buffers[i].scalar_type() == buffers[0].scalar_type(), weight.op, own_name,
                  dtype_name(buffers[0].scalar_type()) << ", as '" << entry(name, 0) << "'",
                  with_strides(buffers[i]), "Pass buffers of one dtype");
  }
  if (!is_grouped) {
    gemm::check_result({weight.op, name, buffers[0]}, like, weight.rows(), weight.columns());
  } else if (expected.is_stack) {
    gemm::check_accumulator({weight.op, name, buffers[0]}, like, expected.sizes());
  } else {
    gemm::check_accumulators(weight.op, name, buffers, like, expected.sizes());
  }
}

void check_weight_gradient(const MainGrad& main_grad, const WeightArgument& weight, bool is_grouped,
                           const Tensor& data) {
  check_main_grad_options(weight.op, main_grad.buffers.has_value(), main_grad);
  check_wgrad_queue(weight.op, "wgrad_queue", main_grad.queue, data);
  check_main_grad("main_grad", main_grad, weight, is_grouped);
}

std::string queue_of(const char* name) { return std::string(name) + "_queue"; }

std::vector<Tensor> saved_matrices(AutogradContext* ctx, const char* name) {
  std::vector<Tensor> result;
  const auto matrix = [&] { return ctx->saved_data.find(entry(name, result.size())); };
  for (auto next = matrix(); next != ctx->saved_data.end(); next = matrix()) {
    result.push_back(next->second.toTensor());
  }
  return result;
}

void save_main_grad(AutogradContext* ctx, const char* name, const MainGrad& main_grad) {
  if (main_grad.queue) ctx->saved_data[queue_of(name)] = *main_grad.queue;
  if (!main_grad.buffers) return;
  const at::TensorList buffers = *main_grad.buffers;
  // One by one: compiled autograd does not see tensors inside a list.
  for (size_t i = 0; i < buffers.size(); ++i) ctx->saved_data[entry(name, i)] = buffers[i];
  if (!main_grad.accumulate) ctx->saved_data["overwrites"] = true;
  if (main_grad.weight_grad != kNone) ctx->saved_data["weight_grad"] = std::string(main_grad.weight_grad);
}

SavedMainGrad saved_main_grad(AutogradContext* ctx, const char* name) {
  if (ctx->saved_data.empty()) return {};
  SavedMainGrad result{saved_matrices(ctx, name)};
  const auto queue = ctx->saved_data.find(queue_of(name));
  if (queue != ctx->saved_data.end()) result.queue = queue->second.toTensor();
  if (result.buffers.empty() && !result.queue) return result;
  // The options of a node with two weights are those of the one that has buffers.
  const auto mode = ctx->saved_data.find("weight_grad");
  if (mode != ctx->saved_data.end()) result.weight_grad = mode->second.toStringRef();
  result.accumulate = result.buffers.empty() || ctx->saved_data.find("overwrites") == ctx->saved_data.end();
  return result;
}

}  // namespace transformer_plugin::linear
