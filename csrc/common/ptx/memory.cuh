// PTX wrappers: prefetches, cache policies, proxy fences, loads and reductions with an order.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace transformer_plugin::ptx {

__device__ __forceinline__ void prefetch_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}

// Cache policies for instructions with L2::cache_hint: data that the L2 cache evicts before all other, or
// after it.
__device__ __forceinline__ uint64_t createpolicy_evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t createpolicy_evict_last() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Orders the thread's accesses to shared memory before the TMA stores and WGMMA that follow.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// The same for global memory that threads write and TMA reads: the writer calls it before it signals, the
// reader calls it after it has seen the signal and before it starts TMA loads.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Counters in global memory between CTAs. Writes before a red_release_gpu_add are visible to a thread that
// reads the new count with ld_acquire_gpu.
__device__ __forceinline__ void red_release_gpu_add(uint32_t* counter, uint32_t count) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(count) : "memory");
}
__device__ __forceinline__ uint32_t ld_acquire_gpu(const uint32_t* counter) {
  uint32_t count;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

}  // namespace transformer_plugin::ptx
