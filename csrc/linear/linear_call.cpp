#include "linear/linear_call.h"

namespace transformer_plugin::linear {

void LinearCall::check_memory() const {
  if (!main_grad.buffers && !buffers.given()) return;
  CallMemory memory(op);
  memory.written("main_grad", main_grad.buffers);
  buffers.add_to(memory);
  memory.read("input", input);
  memory.read("weight", weight);
  memory.read("group_sizes", group_sizes);
  memory.read("bias", bias);
  memory.read("bias_scale", bias_scale);
  memory.read("quantized_weight", quantized_weight);
  memory.check();
}

}  // namespace transformer_plugin::linear
