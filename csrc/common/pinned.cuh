// Pinned host memory that every GPU can write, for errors that kernels report.
#pragma once

#include <cuda_runtime.h>

#include <new>
#include <stdexcept>
#include <string>

namespace transformer_plugin {

// Never freed: CUDA graphs keep its address.
template <typename Word>
Word* new_in_pinned_memory() {
  // Allows the allocation during a stream capture, of which it is not a part.
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
