// PTX wrappers: floating-point arithmetic and conversions.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace transformer_plugin::ptx {

// Adds like tma_reduce_add: subnormals are flushed to zero.
__device__ __forceinline__ float add_ftz(float x, float y) {
  float sum;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(sum) : "f"(x), "f"(y));
  return sum;
}
// NaN if one of them is. From sm_80 on.
__device__ __forceinline__ float max_nan(float x, float y) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
}
// Two E4M3 numbers as two FP16 ones, exactly. From sm_89 on.
__device__ __forceinline__ uint32_t cvt_f16x2_e4m3x2(uint16_t two) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two));
  return halves;
}

}  // namespace transformer_plugin::ptx
