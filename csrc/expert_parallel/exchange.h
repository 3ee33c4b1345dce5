// Helpers of plan, dispatch and combine: checks of a plan's tensors and call headers.
#pragma once

#include <ATen/core/Tensor.h>

#include "common/autograd.h"
#include "common/check.h"
#include "distributed/rank_group.h"
#include "distributed/sum_ranks.h"
#include "expert_parallel/group.h"
#include "expert_parallel/phases.h"

namespace transformer_plugin::expert_parallel {

using distributed::check_timeout;
using distributed::PendingCollective;
using distributed::RankGroup;
using distributed::sum_ranks;

inline constexpr std::initializer_list<at::ScalarType> kPayloadTypes = {at::kFloat, at::kBFloat16, at::kHalf,
                                                                        at::kDouble};

// dtype of routing weights: float32, or float64 for a float64 payload (for numerical checks of gradients).
at::ScalarType weight_type(at::ScalarType payload);

// Checks slot [R * max_tokens, K] and source [capacity]: int32, on the device of `data`.
void check_plan(const char* op, const at::Tensor& slot, const at::Tensor& source, const at::Tensor& data);

// Checks that a number of rows or columns is in [0, largest].
void check_count(const char* op, const char* argument, const c10::SymInt& count, const c10::SymInt& largest,
                 const char* advice);

// The header of a call of dispatch, combine or their gradients. `argument`: the one that holds the rows.
Call exchange_call(const ExpertParallelGroup& group, const Phase& phase, const at::Tensor& slot,
                   const char* argument, at::ScalarType dtype, int64_t width);

// max_tokens of the plan: the rows of `slot` for each rank. ValueError if they do not divide evenly.
int64_t tokens_per_rank(const char* op, const RankGroup& group, const at::Tensor& slot);

// [T, W] -> [max_tokens, W], padded with zero rows; ValueError if T is larger.
at::Tensor pad_rows(const Argument& rows, int64_t max_tokens);

// For the backward ops, which are not differentiable.
template <typename... Tensors>
void check_once_differentiable(const char* op, const Tensors&... grads) {
  TORCH_CHECK_NOT_IMPLEMENTED(!any_wants_grad(grads...),
                              TP_FOUR_PARTS(op, "grad", "a gradient that requires none", "one that does",
                                            "Second derivatives are not implemented"));
}

}  // namespace transformer_plugin::expert_parallel
