#include "linear/main_grad.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "common/tensor.h"
#include "common/torch_version.h"
#include "gemm/dispatch/checks.h"
#include "linear/deferred_wgrad.h"
#include "linear/products.h"
#include "sharded/reduce_gradient.h"

namespace transformer_plugin::linear {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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

namespace {

std::string queue_of(const char* name) { return std::string(name) + "_queue"; }

void check_cut_list(const WeightArgument& weight, const sharded::WeightShard& shard, bool is_quantized) {
  constexpr const char* name = "weight_shard";
  const bool is_list = weight.is_list() || (weight.first().dim() == 3 && weight.groups() == 1);
  const std::string& given = shard.key;
  TP_CHECK_VALUE(is_list, weight.op, name, "no 'each' for a weight of one tensor", "'" << given << "'",
                 "Pass a matrix for each group");
  TP_CHECK_VALUE(!is_quantized, weight.op, name, "no 'each' with a quantized weight", "'" << given << "'",
                 "Leave out the quantized weight: ranks exchange the values of a list");
  TP_CHECK_VALUE(
      weight.rows() * shard.ranks >= shard.rows, weight.op, weight.name,
      "a part of the " << shard.rows << " rows of each matrix on each of " << shard.ranks << " ranks",
      describe(weight.first()), "Cut the matrices as transformer_plugin.parallel.shard_ does");
}

}  // namespace

void check_weight_shard(const WeightArgument& weight, const sharded::WeightShard& shard,
                        const MainGrad& main_grad, bool is_quantized) {
  if (!shard.is_cut()) return;
  constexpr const char* name = "weight_shard";
  TP_CHECK_VALUE(!shard.is_foreign() || !is_traced(weight.first()), weight.op, weight.first_name(),
                 "eager code with a weight that another runtime gathers (attach_distributed_weights)",
                 "'" << shard.name << "' in code that is compiled, exported or traced",
                 "Leave the layer out with torch.compiler.disable(layer)");
  if (shard.each) {
    check_cut_list(weight, shard, is_quantized);
  } else {
    TP_CHECK_VALUE(!weight.is_list(), weight.op, name,
                   "'' or a key with 'each' for a weight of several tensors", "'" << shard.key << "'",
                   "Pass the weight as one stack [G, N, K]");
    const c10::SymInt held = weight.first().sym_size(0) * shard.ranks;
    TP_CHECK_VALUE(held >= shard.rows, weight.op, weight.name,
                   "a part of the " << shard.rows << " rows on each of " << shard.ranks << " ranks",
                   describe(weight.first()), "Cut the weight as transformer_plugin.parallel.shard_ does");
  }
  TP_CHECK_VALUE(!main_grad.queue, weight.op, name, "'' with a queue of weight gradients",
                 "'" << shard.key << "'", "Leave out the queue: ranks add gradients in the backward");
  TP_CHECK_VALUE(!main_grad.buffers || main_grad.buffers->size() == 1 || shard.each, weight.op, "main_grad",
                 "one buffer of the sizes of the weight", main_grad.buffers->size(), "Pass one tensor");
}

namespace {

std::string shard_of(const char* name) { return std::string(name) + "_weight"; }

// The tensors that were saved one by one under a name.
std::vector<Tensor> saved_matrices(AutogradContext* ctx, const char* name) {
  std::vector<Tensor> result;
  const auto matrix = [&] { return ctx->saved_data.find(entry(name, result.size())); };
  for (auto next = matrix(); next != ctx->saved_data.end(); next = matrix()) {
    result.push_back(next->second.toTensor());
  }
  return result;
}

}  // namespace

std::vector<Tensor> saved_shards(AutogradContext* ctx, const char* name, const sharded::WeightShard& shard) {
  const std::string key = shard_of(name);
  if (shard.each) return saved_matrices(ctx, key.c_str());
  const auto found = ctx->saved_data.find(key);
  if (found == ctx->saved_data.end()) return {};
  return {found->second.toTensor()};
}

void save_weight_shard(AutogradContext* ctx, const sharded::WeightShard& shard) {
  if (shard.is_cut()) ctx->saved_data["weight_shard"] = shard.key;
}

sharded::WeightShard saved_weight_shard(const AutogradContext* ctx) {
  const auto key = ctx->saved_data.find("weight_shard");
  if (key == ctx->saved_data.end()) return {};
  return sharded::parse_weight_shard("linear", key->second.toStringRef());
}

void save_main_grad(AutogradContext* ctx, const char* name, const MainGrad& main_grad, at::TensorList weight,
                    const sharded::WeightShard& shard) {
  // Untracked: gradients of the shard do not depend on its values.
  if (shard.is_cut()) {
    const std::string key = shard_of(name);
    if (!shard.each) ctx->saved_data[key] = weight[0];
    for (size_t i = 0; shard.each && i < weight.size(); ++i) {
      ctx->saved_data[entry(key.c_str(), i)] = weight[i];
    }
  }
  if (main_grad.queue) ctx->saved_data[queue_of(name)] = *main_grad.queue;
  if (!main_grad.buffers) return;
  const at::TensorList buffers = *main_grad.buffers;
  // One by one: compiled autograd does not see tensors inside a list.
  for (size_t i = 0; i < buffers.size(); ++i) ctx->saved_data[entry(name, i)] = buffers[i];
  if (!main_grad.accumulate) ctx->saved_data["overwrites"] = true;
  if (main_grad.weight_grad != kNone) ctx->saved_data["weight_grad"] = std::string(main_grad.weight_grad);
}

namespace {

using Tasks = std::unordered_map<torch::autograd::Node*, torch::autograd::GraphTask::ExecInfo>;

// Whether torch.autograd.grad asks for what a node returns for its `i`-th tensor, also behind a cast.
bool is_captured(const Tasks& tasks, const torch::autograd::Node& node, size_t i) {
  torch::autograd::Node* next = node.next_edge(i).function.get();
  while (next && next->name() == "ToCopyBackward0") next = next->next_edge(0).function.get();
  const auto task = tasks.find(next);
  return task != tasks.end() && task->second.captures_ && !task->second.captures_->empty();
}

}  // namespace

// A schedule that computes the gradients of weights later asks for each of them. There are no tasks in a backward that accumulates.
void refuse_capture(const char* name, size_t place, size_t count, bool is_deferred) {
  const Tasks* tasks = torch::autograd::get_current_graph_task_exec_info();
  const auto node = torch::autograd::get_current_node();
  if (!tasks || tasks->empty() || !node) return;
  const std::string prefix = "transformer_plugin::", suffix = "_backward_node", own = node->name();
  if (own.find(prefix) != 0) return;  // a node of compiled code
  bool wanted = false;
  for (size_t i = place; i < place + count && !wanted; ++i) {
    wanted = node->task_should_compute_output(i) && is_captured(*tasks, *node, i);
  }
  const char* option = is_deferred ? "delay_wgrad_compute" : "fuse_wgrad_accumulation";
  TP_CHECK_VALUE(
      !wanted, own.substr(prefix.size(), own.size() - prefix.size() - suffix.size()),
      (is_deferred ? queue_of(name) : name),
      "a backward that accumulates, as the layer has " << option << "=True",
      "torch.autograd.grad for the gradient of its weight, as pipeline schedules with a zero bubble "
      "call it",
      "Pass dw_builder=transformer_plugin.nn.dw_builder(module) to PipelineStage, or leave the option "
      "out");
}

WeightGradient::WeightGradient(AutogradContext* ctx, const char* name, size_t place, size_t count,
                               const sharded::WeightShard& shard, bool is_grouped)
    : ctx_(ctx), place_(place), count_(count), is_grouped_(is_grouped), shard_(shard) {
  for (size_t i = 0; i < count && !is_wanted_; ++i) is_wanted_ = wants(i);
  if (!is_wanted_) return;
  buffers_ = saved_matrices(ctx, name);
  const auto queue = ctx->saved_data.find(queue_of(name));
  if (queue != ctx->saved_data.end()) queue_ = queue->second.toTensor();
  const bool returns_none =
      (queue_ || !buffers_.empty()) && ctx->saved_data.find("weight_grad") == ctx->saved_data.end();
  if (returns_none && !is_traced(queue_ ? *queue_ : buffers_[0]))
    refuse_capture(name, place, count, queue_.has_value());
  if (!shard.is_cut()) return;
  list_ = saved_shards(ctx, name, shard);
  weight_ = list_[0];
  if (!shard.each) list_.clear();
}

// Those of matrices that want no gradient stay.
void WeightGradient::copy_to_buffers(const std::vector<Tensor>& results) const {
  const bool each = buffers_.size() == results.size();
  const std::vector<Tensor> buffers = each ? buffers_ : buffers_[0].unbind();
  for (size_t i = 0; i < results.size(); ++i) {
    Tensor buffer = buffers[i];
    if (count_ == 1 || results.size() == 1 || wants(i)) buffer.copy_(results[i]);
  }
}

// The matrices that want no gradient.
std::vector<int64_t> WeightGradient::skipped() const {
  std::vector<int64_t> result;
  for (size_t i = 0; i < count_; ++i) {
    if (!wants(i)) result.push_back(static_cast<int64_t>(i));
  }
  return result;
}

variable_list WeightGradient::placeholders(at::ScalarType dtype) const {
  variable_list result(count_);
  const auto mode = ctx_->saved_data.find("weight_grad");
  if (buffers_.empty() || mode == ctx_->saved_data.end()) return result;
  const Tensor& first = buffers_[0];
  std::vector<c10::SymInt> sizes{first.sym_size(-2), first.sym_size(-1)};
  if (is_grouped_ && count_ == 1) {
    const c10::SymInt matrices(static_cast<int64_t>(buffers_.size()));
    sizes.insert(sizes.begin(), first.dim() == 3 ? first.sym_size(0) : matrices);
  }
  const auto options = first.options().dtype(dtype);
  const bool is_empty = mode->second.toStringRef() == kEmpty;
  for (size_t i = 0; i < count_; ++i) {
    if (!wants(i)) continue;
    result[i] = is_empty ? at::empty_symint(sizes, options) : at::zeros_symint(sizes, options);
  }
  return result;
}

namespace {

// Whether a tracer must not see the buffers written in place. Inductor copies a graph's input before an op writes it, where
// another input lies in the same memory, and takes the first element of that memory for the first of the input. Buffers that
// begin later, as views of a bucket do, are replaced by temporaries.
bool needs_temporaries(const std::vector<Tensor>& buffers) {
  return std::any_of(buffers.begin(), buffers.end(), [](const Tensor& buffer) {
    return is_traced(buffer) && buffer.sym_storage_offset() != 0;
  });
}

}  // namespace

variable_list WeightGradient::compute(const Quantized& grad, const Quantized& input,
                                      const std::optional<Tensor>& group_sizes, at::ScalarType dtype,
                                      const gemm::LaunchOptions& options) const {
  // The options of a node with two weights are those of the one that has buffers.
  const bool accumulates = buffers_.empty() || ctx_->saved_data.find("overwrites") == ctx_->saved_data.end();
  if (shard_.is_foreign()) return foreign(grad, input, group_sizes, dtype, options);
  if (is_cut()) {
    Tensor own = list_.empty() ? reduced(grad, input, group_sizes, dtype, options)
                               : reduced_list(grad, input, group_sizes, dtype, options);
    if (own.defined()) return {std::move(own)};
    return placeholders(dtype);
  }
  if (queue_) {
    const auto rounded = buffers_.empty() ? std::optional(dtype) : std::nullopt;
    call_defer_wgrad(*queue_, grad, input, group_sizes, {rounded, accumulates, skipped(), options});
    return placeholders(dtype);
  }
  if (!buffers_.empty()) {
    std::vector<Tensor> written = replaced_buffers(buffers_, skipped());
    const bool is_copied = needs_temporaries(buffers_);
    if (is_copied) {
      for (Tensor& buffer : written) {
        buffer = accumulates ? traced_copy(buffer) : at::empty_like(buffer, {}, at::MemoryFormat::Contiguous);
      }
    }
    wgrad_into(grad, input, group_sizes, written, accumulates, options);
    if (is_copied) copy_to_buffers(written);
    return placeholders(dtype);
  }
  Tensor all = wgrad_of(grad, input, group_sizes, dtype, options);
  if (!is_grouped_ && group_sizes) all = all.squeeze(0);
  if (count_ == 1) return {all};
  variable_list result = all.unbind();
  for (size_t i = 0; i < count_; ++i) {
    if (!wants(i)) result[i] = Tensor();
  }
  return result;
}

}  // namespace transformer_plugin::linear
