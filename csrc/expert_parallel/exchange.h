// What plan, dispatch and combine share: shapes and checks of a plan's tensors, and the two ways of a row.
#pragma once

#include <ATen/core/Tensor.h>

#include "common/autograd.h"
#include "common/check.h"
#include "distributed/rank_group.h"

namespace transformer_plugin::expert_parallel {

inline constexpr std::initializer_list<at::ScalarType> kPayloadTypes = {at::kFloat, at::kBFloat16, at::kHalf,
                                                                        at::kDouble};

// float32, or float64 where the payload is (so that gradients can be checked numerically).
at::ScalarType weight_type(at::ScalarType payload);

// slot [R * max_tokens, K] and source [capacity], int32 on the device of `data`.
void check_plan(const char* op, const at::Tensor& slot, const at::Tensor& source, const at::Tensor& data);

// "0 or more" of the rows and columns that are given to an op as numbers.
void check_count(const char* op, const char* argument, const c10::SymInt& count, const c10::SymInt& largest,
                 const char* advice);

// What a call of dispatch, combine and their gradients says of itself. `argument` brings the rows.
Call exchange_call(const RankGroup& group, Phase phase, const at::Tensor& slot, const char* argument,
                   at::ScalarType dtype, int64_t width);

// The rows of `slot` that belong to one rank; ValueError when they cannot be shared out evenly.
int64_t tokens_per_rank(const char* op, const RankGroup& group, const at::Tensor& slot);

// [T, W] -> [max_tokens, W], zeros below; ValueError when T is larger.
at::Tensor pad_rows(const Argument& rows, int64_t max_tokens);

// The gradients have none themselves.
template <typename... Tensors>
void check_once_differentiable(const char* op, const Tensors&... grads) {
  TORCH_CHECK_NOT_IMPLEMENTED(!any_wants_grad(grads...),
                              TP_FOUR_PARTS(op, "grad", "a gradient that requires none", "one that does",
                                            "Second derivatives are not there"));
}

// Rows back at their owners: [R * max_tokens, W], from every rank what it has for this rank's tokens, -> [tokens, W],
// the sum over ranks in ascending order.
at::Tensor sum_ranks(const RankGroup& group, const at::Tensor& received, int64_t tokens);

}  // namespace transformer_plugin::expert_parallel
