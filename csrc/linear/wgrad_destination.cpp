#include "linear/wgrad_destination.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <string>
#include <utility>

#include "common/check.h"
#include "common/tensor.h"
#include "common/torch_version.h"
#include "linear/deferred_wgrad.h"
#include "linear/external_destination.h"
#include "linear/products.h"
#include "linear/reduce_scatter_destination.h"
#include "linear/sharded_weight.h"

namespace transformer_plugin::linear {

using at::Tensor;
using torch::autograd::variable_list;

std::vector<int64_t> WeightInputs::skipped() const {
  std::vector<int64_t> result;
  for (size_t i = 0; i < count; ++i) {
    if (!needs_grad(i)) result.push_back(static_cast<int64_t>(i));
  }
  return result;
}

variable_list WeightInputs::split(const Tensor& gradients) const {
  if (count == 1) return {gradients};
  variable_list result = gradients.unbind();
  for (size_t i = 0; i < count; ++i) {
    if (!needs_grad(i)) result[i] = Tensor();
  }
  return result;
}

variable_list placeholders(const WeightInputs& weight, const SavedMainGrad& main_grad, at::ScalarType dtype) {
  variable_list result(weight.count);
  if (main_grad.buffers.empty() || main_grad.weight_grad == "none") return result;
  const Tensor& first = main_grad.buffers[0];
  std::vector<c10::SymInt> sizes{first.sym_size(-2), first.sym_size(-1)};
  if (weight.is_grouped && weight.count == 1) {
    const c10::SymInt matrices(static_cast<int64_t>(main_grad.buffers.size()));
    sizes.insert(sizes.begin(), first.dim() == 3 ? first.sym_size(0) : matrices);
  }
  const auto options = first.options().dtype(dtype);
  const bool is_empty = main_grad.weight_grad == "empty";
  for (size_t i = 0; i < weight.count; ++i) {
    if (!weight.needs_grad(i)) continue;
    result[i] = is_empty ? at::empty_symint(sizes, options) : at::zeros_symint(sizes, options);
  }
  return result;
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
void refuse_capture(const WeightInputs& weight, const char* name, bool is_deferred) {
  const Tasks* tasks = torch::autograd::get_current_graph_task_exec_info();
  const auto node = torch::autograd::get_current_node();
  if (!tasks || tasks->empty() || !node) return;
  const std::string prefix = "transformer_plugin::", suffix = "_backward_node", own = node->name();
  if (own.find(prefix) != 0) return;  // a node of compiled code
  bool needs_grad = false;
  for (size_t i = weight.first; i < weight.first + weight.count && !needs_grad; ++i) {
    needs_grad = node->task_should_compute_output(i) && is_captured(*tasks, *node, i);
  }
  const char* option = is_deferred ? "delay_wgrad_compute" : "fuse_wgrad_accumulation";
  TP_CHECK_VALUE(
      !needs_grad, own.substr(prefix.size(), own.size() - prefix.size() - suffix.size()),
      (is_deferred ? queue_of(name) : name),
      "a backward that accumulates, as the layer has " << option << "=True",
      "torch.autograd.grad for the gradient of its weight, as pipeline schedules with a zero bubble "
      "call it",
      "Pass dw_builder=transformer_plugin.nn.dw_builder(module) to PipelineStage, or leave the option "
      "out");
}

namespace {

class AutogradDestination final : public WgradDestination {
 public:
  explicit AutogradDestination(const WeightInputs& weight) : weight_(weight) {}

  bool allocates() const override { return true; }

  variable_list compute(const WgradProduct& product) override {
    const auto& [grad, input, group_sizes, dtype, options] = product;
    const Tensor all = wgrad_of(grad, input, group_sizes, dtype, options);
    return weight_.split(!weight_.is_grouped && group_sizes ? all.squeeze(0) : all);
  }

 private:
  const WeightInputs weight_;
};

// Whether a tracer must not see the buffers written in place. Inductor copies a graph's input before an op writes it, where
// another input lies in the same memory, and takes the first element of that memory for the first of the input. Buffers that
// begin later, as views of a bucket do, are replaced by temporaries.
bool needs_temporaries(const std::vector<Tensor>& buffers) {
  return std::any_of(buffers.begin(), buffers.end(), [](const Tensor& buffer) {
    return is_traced(buffer) && buffer.sym_storage_offset() != 0;
  });
}

class MainGradDestination final : public WgradDestination {
 public:
  MainGradDestination(const WeightInputs& weight, SavedMainGrad main_grad)
      : weight_(weight), main_grad_(std::move(main_grad)) {}

  variable_list compute(const WgradProduct& product) override {
    std::vector<Tensor> written = replaced_buffers(main_grad_.buffers, weight_.skipped());
    const bool accumulates = main_grad_.accumulate, is_copied = needs_temporaries(main_grad_.buffers);
    if (is_copied) {
      for (Tensor& buffer : written) {
        buffer = accumulates ? traced_copy(buffer) : at::empty_like(buffer, {}, at::MemoryFormat::Contiguous);
      }
    }
    wgrad_into(product.grad, product.input, product.group_sizes, written, accumulates, product.options);
    if (is_copied) copy_to_buffers(written);
    return placeholders(weight_, main_grad_, product.dtype);
  }

 private:
  // Those of matrices that need no gradient stay.
  void copy_to_buffers(const std::vector<Tensor>& results) const {
    const bool each = main_grad_.buffers.size() == results.size();
    const std::vector<Tensor> buffers = each ? main_grad_.buffers : main_grad_.buffers[0].unbind();
    for (size_t i = 0; i < results.size(); ++i) {
      Tensor buffer = buffers[i];
      if (weight_.count == 1 || results.size() == 1 || weight_.needs_grad(i)) buffer.copy_(results[i]);
    }
  }

  const WeightInputs weight_;
  const SavedMainGrad main_grad_;
};

// run_deferred_wgrads computes the gradient later, into its argument `out`.
class QueueDestination final : public WgradDestination {
 public:
  QueueDestination(const WeightInputs& weight, SavedMainGrad main_grad)
      : weight_(weight), main_grad_(std::move(main_grad)) {}

  bool is_deferred() const override { return true; }

  variable_list compute(const WgradProduct& product) override {
    const auto& [grad, input, group_sizes, dtype, options] = product;
    const auto rounded = main_grad_.buffers.empty() ? std::optional(dtype) : std::nullopt;
    call_defer_wgrad(*main_grad_.queue, grad, input, group_sizes,
                     {rounded, main_grad_.accumulate, weight_.skipped(), options});
    return placeholders(weight_, main_grad_, dtype);
  }

 private:
  const WeightInputs weight_;
  const SavedMainGrad main_grad_;
};

}  // namespace

void save_wgrad_destination(torch::autograd::AutogradContext* ctx, const char* name,
                            const MainGrad& main_grad, at::TensorList weight,
                            const sharded::WeightShard& shard) {
  save_main_grad(ctx, name, main_grad);
  save_shards(ctx, name, weight, shard);
}

std::unique_ptr<WgradDestination> wgrad_destination(const WeightInputs& weight, const char* name,
                                                    const sharded::WeightShard& shard) {
  bool needs_grad = false;
  for (size_t i = 0; i < weight.count && !needs_grad; ++i) needs_grad = weight.needs_grad(i);
  if (!needs_grad) return nullptr;
  SavedMainGrad main_grad = saved_main_grad(weight.ctx, name);
  const bool is_given = main_grad.queue || !main_grad.buffers.empty();
  if (is_given && main_grad.weight_grad == "none") {
    const Tensor& tensor = main_grad.queue ? *main_grad.queue : main_grad.buffers[0];
    if (!is_traced(tensor)) refuse_capture(weight, name, main_grad.queue.has_value());
  }
  if (shard.is_sharded()) {
    std::vector<Tensor> shards = saved_shards(weight.ctx, name, shard);
    if (shard.is_external()) return external_destination(weight, std::move(shards), shard);
    return reduce_scatter_destination(weight, std::move(main_grad), std::move(shards), shard);
  }
  if (main_grad.queue) return std::make_unique<QueueDestination>(weight, std::move(main_grad));
  if (is_given) return std::make_unique<MainGradDestination>(weight, std::move(main_grad));
  return std::make_unique<AutogradDestination>(weight);
}

}  // namespace transformer_plugin::linear
