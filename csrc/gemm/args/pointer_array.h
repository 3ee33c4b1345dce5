// A list of matrices, one for each group, in place of a contiguous stack.
#pragma once

#include <cstdint>

namespace transformer_plugin::gemm {

// The longest list: addresses are passed as kernel arguments.
inline constexpr int64_t kMaxPointers = 1024;

// One matrix for each group, all with the same sizes and row stride. launch_pointer_array
// (gemm/sm90/tensor_map.h) fills `workspace` before the GEMM: the addresses, and on Hopper, from
// pointer_array_maps_offset on, a tensor map for each matrix.
struct PointerArray {
  const void* const* addresses;  // [groups], on the host; null for a stack
  void* workspace;               // on the device: pointer_array_bytes(groups) bytes, 128-byte aligned
};

inline constexpr int64_t kTensorMapBytes = 128;  // size and alignment of a tensor map
constexpr int64_t pointer_array_maps_offset(int64_t groups) {
  const int64_t bytes = groups * static_cast<int64_t>(sizeof(void*));
  return (bytes + kTensorMapBytes - 1) / kTensorMapBytes * kTensorMapBytes;
}
constexpr int64_t pointer_array_bytes(int64_t groups) {
  return pointer_array_maps_offset(groups) + groups * kTensorMapBytes;
}

}  // namespace transformer_plugin::gemm
