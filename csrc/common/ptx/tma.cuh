// PTX wrappers: TMA loads, stores and reductions, tensor maps, bulk copies.
//
// TMA copies a box of a 3-dimensional tensor that a tensor map (CUtensorMap) describes. Coordinates x, y, z
// count elements, innermost dimension first. Elements outside of the tensor are loaded as zeros and are not
// stored. A bulk copy copies bytes in a row and needs no tensor map: addresses and sizes are multiples of 16.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/shared_memory.cuh"

namespace transformer_plugin::ptx {

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

__device__ __forceinline__ void cp_async_bulk_load(void* to, const void* from, uint32_t bytes,
                                                   uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
// `policy` is one of createpolicy (memory.cuh).
__device__ __forceinline__ void cp_async_bulk_store(void* to, const void* from, uint32_t bytes,
                                                    uint64_t policy) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes), "l"(policy)
               : "memory");
}

// The stores and reductions of a thread, by TMA or in bulk, since its last commit are a group.
__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until at most `pending` groups are incomplete.
template <int pending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}
// Waits until at most `pending` groups still read shared memory.
template <int pending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

}  // namespace transformer_plugin::ptx
