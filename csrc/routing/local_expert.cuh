// The expert of an index, shared by the kernels that count and assign.
#pragma once

#include <cstdint>

namespace transformer_plugin::routing {

// The number of the expert in a layout of `experts` from `first` on, or -1.
template <typename Index>
__device__ __forceinline__ int local_expert(Index index, int64_t first, int64_t experts) {
  const int64_t expert = static_cast<int64_t>(index);
  return expert >= first && expert - first < experts ? static_cast<int>(expert - first) : -1;
}

}  // namespace transformer_plugin::routing
