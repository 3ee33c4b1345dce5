// Memory of the host that every GPU can write: where kernels leave word of what they noticed.
#pragma once

#include <cuda_runtime.h>

#include <new>
#include <stdexcept>
#include <string>

namespace transformer_plugin {

// Never freed: graphs keep its address.
template <typename Word>
Word* new_in_pinned_memory() {
  // A capture under way is not to mind the allocation, which has nothing to do with it.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  void* memory = nullptr;
  const cudaError_t error = cudaHostAlloc(&memory, sizeof(Word), cudaHostAllocPortable);
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("transformer_plugin: allocation of pinned memory failed: ") +
                             cudaGetErrorString(error));
  }
  return new (memory) Word{};
}

}  // namespace transformer_plugin
