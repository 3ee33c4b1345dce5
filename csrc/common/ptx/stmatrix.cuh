// PTX wrappers: stmatrix, which stores four 8 x 8 matrices of 16-bit elements from the registers of a warp to
// shared memory.
//
// Each lane passes the address of one row. The register layout is that of WGMMA accumulators.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/shared_memory.cuh"

namespace transformer_plugin::ptx {

__device__ __forceinline__ void stmatrix_x4(void* row, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}
// Transposes each matrix.
__device__ __forceinline__ void stmatrix_x4_trans(void* row, const uint32_t (&words)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
      : "memory");
}

}  // namespace transformer_plugin::ptx
