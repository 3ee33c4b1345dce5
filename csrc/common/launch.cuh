// Launching a CUDA kernel and hearing of its failure.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace transformer_plugin {

inline constexpr int kWarpSize = 32;

inline void check_launch(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("transformer_plugin: launch of ") + kernel +
                             " failed: " + cudaGetErrorString(error));
  }
}

// Blocks for `items` at `per_block` each, never more than a grid's x dimension holds; kernels stride over the rest.
inline unsigned grid_size(int64_t items, int64_t per_block) {
  const int64_t blocks = (items + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : (blocks > 0x7fffffff ? 0x7fffffff : blocks));
}

#ifdef __CUDACC__
// The next kernel of the stream may start, if it was launched to; what it has to wait for, it waits for.
__device__ __forceinline__ void let_the_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// In a kernel that launch_early starts, before what depends on others: until all that the stream did before is done.
__device__ __forceinline__ void wait_for_the_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether kernels on the current device hold the instructions above. Those that a newer GPU's driver compiles from PTX for an
// older one do not, and would run before what they depend on.
bool kernels_wait_for_others();

// A launch that need not wait until the kernel before has ended: its own way onto the device overlaps with that.
template <typename... Parameters, typename... Arguments>
void launch_early(void (*kernel)(Parameters...), dim3 grid, unsigned block, size_t shared,
                  cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = kernels_wait_for_others() ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}
#endif

}  // namespace transformer_plugin
