// Buffers of the caller into which a layer writes its output, and its backward the gradient of its input.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <optional>

#include "common/buffers.h"

namespace transformer_plugin::linear {

struct CallerBuffers {
  std::optional<at::Tensor> out = {};        // of the sizes and the dtype of the output
  std::optional<at::Tensor> dgrad_out = {};  // of those of the input

  bool given() const { return out || dgrad_out; }
  // For the check of a call that no two of its tensors share memory.
  void add_to(CallMemory& memory) const;
};

// Contiguous buffers of the right sizes, dtype and device, which autograd does not know. `columns`: of the output.
void check_caller_buffers(const Argument& input, const c10::SymInt& columns, const CallerBuffers& buffers);
// In the forward: keeps dgrad_out for the backward, untracked, because the backward writes it and reads nothing of it.
void save_dgrad_out(torch::autograd::AutogradContext* ctx, const CallerBuffers& buffers);
// In the backward. Refuses one in the memory of the gradient that arrives, as the next layer's dgrad_out may be. While the
// context keeps the tensor, autograd makes no .grad of a leaf of it, which a second backward would overwrite and add to
// itself.
std::optional<at::Tensor> saved_dgrad_out(const torch::autograd::AutogradContext* ctx, const char* op,
                                          const at::Tensor& grad);
// The rows of an input [..., K] whose gradient is written to the buffer: what as_matrix() does, but the gradient of the
// input is the buffer itself, which autograd does not make the .grad of a leaf (see saved_dgrad_out).
at::Tensor rows_into(const at::Tensor& input, const at::Tensor& dgrad_out);

}  // namespace transformer_plugin::linear
