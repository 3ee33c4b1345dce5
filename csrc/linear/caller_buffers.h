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
// In the backward. Another tensor of the same memory, so that autograd may keep it as the gradient of a leaf.
std::optional<at::Tensor> saved_dgrad_out(const torch::autograd::AutogradContext* ctx);
// Tells autograd that the op wrote the buffer.
void mark_written(const at::Tensor& out);

}  // namespace transformer_plugin::linear
