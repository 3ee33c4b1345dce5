// Moving rows between tokens and slots, and the pieces of its gradients: shared by permute and by
// expert_parallel. The arithmetic is described in rows_args.h. Each function checks nothing but sizes that
// would be our own mistake, makes its inputs contiguous, allocates its output on their device, and runs on
// CPU or CUDA by that device; on CUDA nothing is read on the host, and the work can be captured in a graph.
//
// `slot` is int32 [tokens, topk], `source` int32 [capacity], `weights` and results of its shape are float32,
// or float64 where the rows are float64.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace transformer_plugin::routing {

// [tokens, H] -> [capacity, H]: the row of each slot's token, zeros where there is none. Any dtype, copied
// bit for bit. Its gradient is sum_slots(grad, slot).
at::Tensor gather_rows(const at::Tensor& rows, const at::Tensor& source);

// The same, each row times the weight of its (token, k), rounded once: the gradient of sum_slots to its rows.
at::Tensor gather_scaled_rows(const at::Tensor& rows, const at::Tensor& source, const at::Tensor& slot,
                              const at::Tensor& weights);

// [capacity, H] -> [tokens, H]: the weighted sum of each token's slots, in ascending order of slot.
at::Tensor sum_slots(const at::Tensor& rows, const at::Tensor& slot,
                     const std::optional<at::Tensor>& weights);

// [tokens, topk]: <rows[slot], grad[token]>, the gradient of sum_slots to its weights; 0 where there is no
// slot.
at::Tensor dot_slots(const at::Tensor& rows, const at::Tensor& slot, const at::Tensor& grad);

// weights [tokens, topk] -> [capacity], each weight in its slot and 0 elsewhere.
at::Tensor weights_to_slots(const at::Tensor& weights, const at::Tensor& slot, const at::Tensor& source);

// values [capacity] -> [tokens, topk], each slot's value back at its (token, k) and 0 where there is no slot:
// the gradient of weights_to_slots.
at::Tensor weights_from_slots(const at::Tensor& values, const at::Tensor& slot);

}  // namespace transformer_plugin::routing
