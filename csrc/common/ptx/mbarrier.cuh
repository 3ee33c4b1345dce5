// PTX wrappers: mbarriers in shared memory.
//
// An mbarrier phase completes when the expected number of threads has arrived and all announced bytes
// (expect_tx) have been written. Names and semantics follow the PTX ISA.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/shared_memory.cuh"

namespace transformer_plugin::ptx {

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}
// Makes initialized mbarriers visible to the other CTAs of the cluster and to TMA.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives at an mbarrier of this CTA.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives and adds `bytes` to the bytes that the phase waits for.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
// Adds `bytes` without an arrival. The caller arrives later in the same phase.
__device__ __forceinline__ void mbarrier_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
// Arrives at the same mbarrier of CTA `cta_rank` of the cluster. The arrival has no .release.cluster: that
// fence would wait for all outstanding global stores of the thread.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint64_t* barrier, uint32_t cta_rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(shared_address(barrier)),
      "r"(cta_rank)
      : "memory");
}
// Waits until the phase with this parity has completed.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finish;\nbra again;\nfinish:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// Stores 16 bytes to shared memory of this CTA and completes 16 bytes of the mbarrier's transaction count.
__device__ __forceinline__ void st_async(uint64_t* barrier, void* to, const int4& value) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(
          shared_address(to)),
      "r"(shared_address(barrier)), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
      : "memory");
}

}  // namespace transformer_plugin::ptx
