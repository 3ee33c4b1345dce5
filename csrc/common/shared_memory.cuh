// Shared memory: addresses in it, and more of it than a kernel has without asking.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace transformer_plugin {

#ifdef __CUDACC__
// What instructions take for a place in shared memory.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
#endif

// Lets a kernel have so much dynamic shared memory, which CUDA is asked once for each device: of each call it would take
// part of the time that a launch takes. One object for each kernel, static.
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
