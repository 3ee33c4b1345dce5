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

}  // namespace transformer_plugin
