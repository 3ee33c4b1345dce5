// Which rows a rank receives where these are fewer than the tokens of all ranks: the map between the two, and the bound on
// their number. Sizes are static, and on CUDA the host reads nothing.
#pragma once

#include <ATen/core/Tensor.h>

namespace transformer_plugin::expert_parallel {

// int64 [R]: the number of tokens of which each rank has an expert. `indices`: int32 [R * max_tokens, K] of all ranks.
at::Tensor count_distinct_tokens(const at::Tensor& indices, int64_t experts, int64_t ranks);

// `indices`, without those of the experts first, ..., first + experts - 1 in tokens past the first `bound` that name any of them.
at::Tensor drop_tokens_past(const at::Tensor& indices, int64_t first, int64_t experts, int64_t bound);

struct CompactRows {
  at::Tensor slot;      // int32 [rows, K], of the received rows
  at::Tensor source;    // int32 [capacity]: the received row of each row of the experts, or -1
  at::Tensor received;  // int32 [rows]: the token of each received row, or -1
  at::Tensor position;  // int32 [tokens]: the received row of each token, or -1
};

// Numbers the tokens that have a slot, of which there are at most `rows`, in ascending order. `slot` [tokens, K] and `source`
// [capacity] are those of the tokens of all ranks.
CompactRows compact_rows(const at::Tensor& slot, const at::Tensor& source, int64_t rows);

}  // namespace transformer_plugin::expert_parallel
