// PTX wrappers: TMA loads, stores and reductions, cp.async, prefetches, proxy fences.
//
// TMA copies a box of a 3-dimensional tensor that a tensor map (CUtensorMap) describes. Coordinates x, y, z
// count elements, innermost dimension first. Elements outside of the tensor are loaded as zeros and are not
// stored.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/shared_memory.cuh"

namespace transformer_plugin::gemm::sm90 {

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Required before the first TMA operation with a tensor map that an earlier kernel wrote to global memory.
__device__ __forceinline__ void fence_tensormap_acquire(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load(void* to, const CUtensorMap& map, uint64_t* barrier, int x, int y,
                                         int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::"
      "complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// Writes the box to the same shared memory offset of every CTA whose bit in `cta_mask` is set, and completes
// the bytes at the mbarrier of each of them.
__device__ __forceinline__ void tma_load_multicast(uint16_t cta_mask, void* to, const CUtensorMap& map,
                                                   uint64_t* barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::"
      "complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(cta_mask)
      : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const void* from, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, "
      "{%2, %3, %4}], [%1];" ::"l"(&map),
      "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// Adds the box to global memory, in the L2 cache. FP32 subnormals are flushed to zero.
__device__ __forceinline__ void tma_reduce_add(const CUtensorMap& map, const void* from, int x, int y,
                                               int z) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          &map),
      "r"(shared_address(from)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// Adds like tma_reduce_add: subnormals are flushed to zero.
__device__ __forceinline__ float add_ftz(float x, float y) {
  float sum;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(sum) : "f"(x), "f"(y));
  return sum;
}
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until at most `pending` groups of stores still read shared memory.
template <int pending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Copies 16 bytes to shared memory, or writes 16 zeros without reading. Not TMA: fence_proxy_async is needed,
// by the thread that waited for the copy, before WGMMA reads the data.
__device__ __forceinline__ void cp_async_zfill(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
// Arrives at an mbarrier when all copies that this thread has started are complete; at once if there are none. The
// mbarrier counts it as one of the arrivals that it expects.
__device__ __forceinline__ void cp_async_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void prefetch_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
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

// Counters in global memory between CTAs. Writes before a red_release_add are visible to a thread that reads
// the new count with ld_acquire.
__device__ __forceinline__ void red_release_add(uint32_t* counter, uint32_t count) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(count) : "memory");
}
__device__ __forceinline__ uint32_t ld_acquire(const uint32_t* counter) {
  uint32_t count;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

}  // namespace transformer_plugin::gemm::sm90
