// Shared memory: addresses, and opting in to more dynamic shared memory.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace transformer_plugin {

#ifdef __CUDACC__
// The address that PTX instructions take for shared memory.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
#endif

// Opts a kernel in to `bytes` of dynamic shared memory, once per device: the call to CUDA takes a noticeable
// part of the time of a launch. One static object per kernel.
class DynamicSharedMemory {
 public:
  template <typename Kernel>
  void allow(Kernel kernel, int bytes) {
    int device = 0;
    cudaGetDevice(&device);
    const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
    if (devices_.load(std::memory_order_relaxed) & bit) return;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess) {
      devices_.fetch_or(bit, std::memory_order_relaxed);
    }
  }

 private:
  std::atomic<uint64_t> devices_ = 0;
};

}  // namespace transformer_plugin
