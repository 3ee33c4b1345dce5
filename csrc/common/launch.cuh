// Launching CUDA kernels, also by programmatic dependent launch (PDL), and checking for launch errors.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace transformer_plugin {

inline constexpr int kWarpSize = 32;

// Raises for a GPU of which the library has no kernels.
[[noreturn]] void refuse_gpu(const char* kernel);

inline void check_launch(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return;
  // The second is that of questions about a kernel, which some launches begin with.
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) refuse_gpu(kernel);
  throw std::runtime_error(std::string("transformer_plugin: launch of ") + kernel +
                           " failed: " + cudaGetErrorString(error));
}

// Blocks for `items` at `per_block` each, at most the maximum x dimension of a grid; kernels loop over the
// rest.
inline unsigned grid_size(int64_t items, int64_t per_block) {
  const int64_t blocks = (items + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : (blocks > 0x7fffffff ? 0x7fffffff : blocks));
}

#ifdef __CUDACC__
// Lets the next kernel of the stream start, if launch_pdl launched it; it waits at its own pdl_wait().
__device__ __forceinline__ void pdl_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until earlier kernels have finished. Call it before the first access to memory that they write.
__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether kernels on the current device contain griddepcontrol. PTX built for an older architecture and
// compiled by the driver of a newer one does not, so such a kernel must not be launched before its
// predecessors have finished.
bool supports_pdl();

// Programmatic dependent launch: the launch overlaps with the end of the previous kernel.
template <typename... Parameters, typename... Arguments>
void launch_pdl(void (*kernel)(Parameters...), dim3 grid, unsigned block, size_t shared, cudaStream_t stream,
                const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = supports_pdl() ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}
#endif

}  // namespace transformer_plugin
