// Helpers of all_gather and reduce_scatter.
#pragma once

#include <ATen/core/Tensor.h>

#include "common/check.h"
#include "distributed/rank_group.h"
#include "tensor_parallel/phases.h"

namespace transformer_plugin::tensor_parallel {

using distributed::RankGroup;

// Checks that do not need the group: the tensor has rows, and there are ranks.
void check_exchange(const Argument& tensor, int64_t num_ranks, int64_t timeout_ms);
// The group has as many ranks as the caller says.
void check_ranks(const char* op, const RankGroup& group, int64_t num_ranks);
// Elements of a row.
int64_t width_of(const at::Tensor& tensor);
// The header of a call. `wanted`: whether autograd will compute a gradient.
Call exchange_call(const Phase& phase, const char* argument, const at::Tensor& tensor, bool wanted);

// The two ops, through the dispatcher.
at::Tensor call_all_gather(const at::Tensor& part, int64_t num_ranks, const std::string& group_name,
                           int64_t timeout_ms, int64_t wanted = -1);
at::Tensor call_reduce_scatter(const at::Tensor& parts, int64_t num_ranks, const std::string& group_name,
                               int64_t timeout_ms, int64_t wanted = -1);

}  // namespace transformer_plugin::tensor_parallel
