// Words that ranks read and write in each other's memory, the clock that bounds a wait, and dynamic shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace transformer_plugin::expert_parallel::one_sided {

// What the thread has written or seen before is visible to a thread of any rank that reads this value by
// load_acquire_system.
__device__ __forceinline__ void store_release_system(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}
__device__ __forceinline__ void store_release_system(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ __forceinline__ int32_t* dynamic_words() {
  extern __shared__ __align__(16) int32_t words[];
  return words;
}

}  // namespace transformer_plugin::expert_parallel::one_sided
