// PTX wrappers: floating-point arithmetic.
#pragma once

#include <cuda_runtime.h>

namespace transformer_plugin::ptx {

// Adds like tma_reduce_add: subnormals are flushed to zero.
__device__ __forceinline__ float add_ftz(float x, float y) {
  float sum;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(sum) : "f"(x), "f"(y));
  return sum;
}

}  // namespace transformer_plugin::ptx
