#include "linear/linear_call.h"

#include "linear/products.h"

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

at::Tensor product_of(const LinearCall& call, const Quantized& input, const Quantized& weight,
                      at::TensorList matrices) {
  return gemm_of({.a = input,
                  .b = weight,
                  .matrices = matrices,
                  .group_sizes = call.group_sizes,
                  .bias = call.bias,
                  .bias_scale = call.bias_scale,
                  .dtype = call.input.scalar_type(),
                  .options = call.options,
                  .out = call.buffers.out});
}

}  // namespace transformer_plugin::linear
