// Copies rows between tokens and slots, and computes the gradients of that: shared by permute and
// expert_parallel. The arithmetic is described in rows_args.h. Each function makes its inputs contiguous,
// allocates its output on their device, and runs on CPU or CUDA. The only checks are internal, of sizes. On
// CUDA the host reads nothing, and the work can be captured in a graph.
//
// `slot` is int32 [tokens, topk], `source` int32 [capacity]. `weights` and results of its shape are float32,
// or float64 if the rows are float64.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace transformer_plugin::routing {

// [tokens, H] -> [capacity, H]: the row of each slot's token, zeros in slots without a token. Any dtype,
// copied bit for bit. Its gradient is sum_slots(grad, slot). `slot` is the other direction of the map, if the
// caller has it: with it, CUDA reads each token's row once instead of once per slot. It never changes the
// result. `offsets` int32 [G + 1]: the first rows of groups, past the last of which nothing is written.
at::Tensor gather_rows(const at::Tensor& rows, const at::Tensor& source,
                       const std::optional<at::Tensor>& slot = std::nullopt,
                       const std::optional<at::Tensor>& offsets = std::nullopt);

// The same into `output`, which is contiguous.
void gather_rows_out(const at::Tensor& rows, const at::Tensor& source, const std::optional<at::Tensor>& slot,
                     const at::Tensor& output, const std::optional<at::Tensor>& offsets = std::nullopt);

// The same, each row times the weight of its (token, k), rounded once: the gradient of sum_slots with respect
// to its rows.
at::Tensor gather_scaled_rows(const at::Tensor& rows, const at::Tensor& source, const at::Tensor& slot,
                              const at::Tensor& weights);

// [capacity, H] -> [tokens, H]: the weighted sum of each token's slots, in ascending order of slot. Rounded
// once.
at::Tensor sum_slots(const at::Tensor& rows, const at::Tensor& slot,
                     const std::optional<at::Tensor>& weights);

// [tokens, topk]: <rows[slot], grad[token]>, the gradient of sum_slots with respect to its weights; 0 without
// a slot.
at::Tensor dot_slots(const at::Tensor& rows, const at::Tensor& slot, const at::Tensor& grad);

// weights [tokens, topk] -> [capacity], each weight in its slot and 0 in the others.
at::Tensor weights_to_slots(const at::Tensor& weights, const at::Tensor& slot, const at::Tensor& source);
// The same into `output`, which is contiguous.
void weights_to_slots_out(const at::Tensor& weights, const at::Tensor& slot, const at::Tensor& source,
                          const at::Tensor& output);

// values [capacity] -> [tokens, topk], the value of the slot of each (token, k), 0 without a slot: the
// gradient of weights_to_slots.
at::Tensor weights_from_slots(const at::Tensor& values, const at::Tensor& slot);

}  // namespace transformer_plugin::routing
