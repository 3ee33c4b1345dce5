// PTX wrappers: barriers of a cluster, named barriers, and which CTA and cluster this is.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace transformer_plugin::ptx {

// Rank of this CTA in its cluster.
__device__ __forceinline__ uint32_t cluster_ctarank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Index of this cluster in the grid.
__device__ __forceinline__ int clusterid_x() {
  int index;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}
// Waits for all threads of the cluster, and for what they wrote. The threads of a warp must have converged.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait."
      "acquire.aligned;" ::
          : "memory");
}

// Named barrier `id`, for `threads` threads in total: wait for all of them, or arrive without waiting.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace transformer_plugin::ptx
