// Helpers of all_gather and reduce_scatter.
#pragma once

#include <ATen/core/Tensor.h>

#include "common/autograd.h"
#include "common/check.h"
#include "distributed/rank_group.h"
#include "tensor_parallel/phases.h"

namespace transformer_plugin::tensor_parallel {

using distributed::RankGroup;

// Checks that do not need the group: the tensor has rows, and there are ranks.
void check_exchange(const Argument& tensor, int64_t num_ranks, int64_t timeout_ms);
// The tensor's storage was not freed or shortened, as FSDP2 does with what it gathered.
void check_memory(const Argument& tensor);
// The group has as many ranks as the caller says.
void check_ranks(const char* op, const RankGroup& group, int64_t num_ranks);
// The same, and that the rows can be added and divided among the ranks. Returns the sizes of a rank's rows.
std::vector<c10::SymInt> reduced_sizes(const Argument& input, int64_t num_ranks, int64_t timeout_ms);
// [R * n, W]: this rank's rows as each rank has them.
at::Tensor all_to_all_rows(const RankGroup& group, const at::Tensor& input, const Phase& phase);
// This rank's rows of the sum over ranks, times `factor`, into a contiguous buffer, or added to it.
void reduce_scatter_into(const RankGroup& group, const at::Tensor& input, const Phase& phase,
                         const at::Tensor& out, bool accumulate, double factor);
// Elements of a row.
int64_t width_of(const at::Tensor& tensor);
// The header of a call. `needs_grad`: whether autograd will compute a gradient.
Call exchange_call(const Phase& phase, const char* argument, const at::Tensor& tensor, bool needs_grad);
// That of a call with several tensors.
Call list_call(const Phase& phase, const char* argument, at::TensorList inputs);

// The node of a collective, whose gradient is the other one. `Op` has kName, call() and call_gradient().
template <typename Op>
class ExchangeFunction : public CheckedFunction<ExchangeFunction<Op>> {
 public:
  static constexpr const char* kName = Op::kName;
  static constexpr bool is_traceable = true;

  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& tensor,
                            int64_t num_ranks, std::string_view group_name, int64_t timeout_ms) {
    ctx->saved_data["num_ranks"] = num_ranks;
    ctx->saved_data["group_name"] = std::string(group_name);
    ctx->saved_data["timeout_ms"] = timeout_ms;
    const BelowAutograd guard;
    return Op::call(tensor, num_ranks, group_name, timeout_ms, 1);
  }

  // A gradient that is absent here is zeros: other ranks may have one, and all take part.
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    auto& saved = ctx->saved_data;
    const at::Tensor grad =
        Op::call_gradient(grads[0], saved["num_ranks"].toInt(), saved["group_name"].toStringRef(),
                          saved["timeout_ms"].toInt(), -1);
    return {grad, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

template <typename Op>
at::Tensor exchange_autograd(const at::Tensor& tensor, int64_t num_ranks, std::string_view group_name,
                             int64_t timeout_ms, int64_t needs_grad) {
  if (any_requires_grad(tensor)) {
    return ExchangeFunction<Op>::apply(tensor, num_ranks, group_name, timeout_ms);
  }
  const BelowAutograd guard;
  // In a compiled graph `needs_grad` holds the value from the time of tracing.
  return Op::call(tensor, num_ranks, group_name, timeout_ms, needs_grad);
}

}  // namespace transformer_plugin::tensor_parallel
