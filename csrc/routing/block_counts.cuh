// The tokens of each expert, counted by the threads of a block in shared memory and then added to counters in
// global memory. Integer atomics are deterministic.
#pragma once

#include "common/launch.cuh"

namespace transformer_plugin::routing {

// By a memset: before the grid that adds to counters.
template <typename T>
void set_to_zero(T* values, int64_t count, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(values, 0, static_cast<size_t>(count) * sizeof(T), stream);
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("transformer_plugin: memset failed: ") + cudaGetErrorString(error));
  }
}

// With all threads of the block, which then may count.
__device__ __forceinline__ void clear_counts(int32_t* counts, int64_t experts) {
  for (int64_t e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
  __syncthreads();
}

// With all threads of the block, after they have counted. Neighboring threads add to neighboring counters.
__device__ __forceinline__ void add_counts(const int32_t* counts, int64_t experts, int64_t* counters) {
  __syncthreads();
  for (int64_t e = threadIdx.x; e < experts; e += blockDim.x) {
    if (counts[e] == 0) continue;
    atomicAdd(reinterpret_cast<unsigned long long*>(counters + e),
              static_cast<unsigned long long>(counts[e]));
  }
}

}  // namespace transformer_plugin::routing
