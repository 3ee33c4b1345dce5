// PTX wrappers: cp.async, copies from global to shared memory by threads.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/shared_memory.cuh"

namespace transformer_plugin::ptx {

// Copies 16 bytes to shared memory. Not TMA: fence_proxy_async is needed, by the thread that waited for the
// copy, before WGMMA reads the data.
__device__ __forceinline__ void cp_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// The same, or writes 16 zeros without reading. The hint L2::256B suits rows of which 256 bytes are read.
__device__ __forceinline__ void cp_async_zfill(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
// The copies of a thread since its last commit are a group.
__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most `pending` groups are incomplete.
template <int pending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
// Waits for all copies that this thread has started.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Arrives at an mbarrier when all copies that this thread has started are complete; at once if there are
// none. The mbarrier counts it as one of the arrivals that it expects.
__device__ __forceinline__ void cp_async_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

}  // namespace transformer_plugin::ptx
