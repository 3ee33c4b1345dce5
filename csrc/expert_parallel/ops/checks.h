// Helpers of plan, dispatch and combine: checks of a plan's tensors and call headers.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "common/autograd.h"
#include "common/buffers.h"
#include "common/check.h"
#include "expert_parallel/transport.h"

namespace transformer_plugin::expert_parallel {

using distributed::check_timeout;
using OptionalTensor = std::optional<at::Tensor>;

inline constexpr std::initializer_list<at::ScalarType> kPayloadTypes = {at::kFloat, at::kBFloat16, at::kHalf,
                                                                        at::kDouble};

// dtype of routing weights: float32, or float64 for a float64 payload (for numerical checks of gradients).
at::ScalarType weight_type(at::ScalarType payload);

// The tensors of a plan that say which rows a rank receives (TokenLayout), and which rows of its experts hold them.
struct ReceivedRows {
  const at::Tensor& slot;          // int32 [N, K]
  const OptionalTensor& received;  // int32 [N], or by records [4, R + 1]
  const OptionalTensor& position;  // int32 [R * max_tokens], or by records [3, max_tokens, min(K, R)]

  bool is_by_records() const { return received && received->dim() == 2; }
  // The tokens that one rank may have at most; a bound where R is not known.
  c10::SymInt tokens() const {
    if (is_by_records()) return position->sym_size(1);
    return position ? position->sym_size(0) : slot.sym_size(0);
  }
};

// Which rows a dispatch makes of the received ones.
struct ExpertRows {
  bool expand;  // those of the experts, in their slots
  const at::Tensor &slot, &source;
  OptionalTensor out = std::nullopt;

  Payload payload(const at::Tensor& rows, const Phase& phase) const {
    return expand ? Payload{rows, phase, slot, source, out} : Payload{rows, phase};
  }
};

// Checks the tensors of a plan: dtypes, sizes, and that all are on the device of `data`.
void check_received(const char* op, const ReceivedRows& rows, const at::Tensor& data);
void check_plan(const char* op, const ReceivedRows& rows, const at::Tensor& source, const at::Tensor& data);

// Checks that a number of rows or columns is in [0, largest].
void check_count(const char* op, const char* argument, const c10::SymInt& count, const c10::SymInt& largest,
                 const char* advice);

// What a transport needs of a plan. ValueError if it is not one of this group.
TokenLayout layout_of(const char* op, const RankGroup& group, const ReceivedRows& rows);

// Checks, where the plan that made `slot` is known, that it made `source` too.
void check_source(const char* op, const ExpertParallelGroup& group, const at::Tensor& slot,
                  const at::Tensor& source);

// The header of a call of dispatch, combine or their gradients. `argument`: the one that holds the rows.
Call exchange_call(const ExpertParallelGroup& group, const Phase& phase, const TokenLayout& layout,
                   const at::Tensor& slot, const char* argument, at::ScalarType dtype, int64_t width);

// The rows as a transport takes them, contiguous; ValueError if they are more than max_tokens.
at::Tensor token_rows(const Argument& rows, int64_t max_tokens);

// For an op that returns what a transport gave it: with one rank that may be the op's own argument, which is then copied.
at::Tensor not_aliased(const at::Tensor& result, const at::Tensor& argument);

// Checks a buffer of the caller for a result of these sizes and this dtype.
void check_buffer(const Argument& buffer, const at::Tensor& result);

// For the backward ops, which are not differentiable.
template <typename... Tensors>
void check_once_differentiable(const char* op, const Tensors&... grads) {
  TORCH_CHECK_NOT_IMPLEMENTED(!any_requires_grad(grads...),
                              TP_FOUR_PARTS(op, "grad", "a gradient that requires none", "one that does",
                                            "Second derivatives are not implemented"));
}

}  // namespace transformer_plugin::expert_parallel
