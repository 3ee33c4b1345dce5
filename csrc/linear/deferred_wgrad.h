// Weight gradients that are computed later than their backward: a queue of a layer's weight keeps the
// operands.
#pragma once

#include "linear/operands.h"

namespace transformer_plugin::linear {

// The argument of a layer's op: an int64 scalar on the CPU with the id of a queue. Its value identifies the
// queue, not its address, so a copy that a compiler makes is the same queue. `data`: any tensor of the layer.
void check_wgrad_queue(const char* op, const char* name, const std::optional<at::Tensor>& queue,
                       const at::Tensor& data);

// What defer_wgrad keeps besides the operands.
struct DeferOptions {
  // Of a gradient that is rounded before it is added; none: added in the epilogue.
  std::optional<at::ScalarType> dtype;
  bool accumulate;               // or write over what the buffers hold
  std::vector<int64_t> skipped;  // matrices of a list that need no gradient
  gemm::LaunchOptions launch;
};

// Calls the op, which a tracer then records.
void call_defer_wgrad(const at::Tensor& queue, const Quantized& grad, const Quantized& input,
                      const std::optional<at::Tensor>& group_sizes, const DeferOptions& options);

// The buffers, those of the `skipped` matrices replaced by others of the same strides, so that they keep what
// they hold.
std::vector<at::Tensor> replaced_buffers(at::TensorList buffers, at::IntArrayRef skipped);

}  // namespace transformer_plugin::linear
