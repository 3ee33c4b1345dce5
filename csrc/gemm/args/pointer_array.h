// Matrices of groups that lie each at an address of its own, and how kernels find them.
#pragma once

#include <cstdint>

namespace transformer_plugin::gemm {

// At most so many: their addresses travel in the arguments of a launch.
inline constexpr int64_t kMaxPointers = 1024;

// One matrix for each group, all of one size and one row stride. The launch before the product's (launch_pointer_array in
// gemm/sm90/tensor_map.h) writes what its kernel reads into `room`: the addresses, and on Hopper from pointer_array_maps_offset on a tensor
// map of each matrix.
struct PointerArray {
  const void* const* addresses;  // [groups], on the host; null where the matrices are one stack
  void* room;                    // pointer_array_bytes(groups) bytes on the device, at a multiple of 128
};

inline constexpr int64_t kTensorMapBytes = 128;  // their addresses are multiples of it too
constexpr int64_t pointer_array_maps_offset(int64_t groups) {
  const int64_t bytes = groups * static_cast<int64_t>(sizeof(void*));
  return (bytes + kTensorMapBytes - 1) / kTensorMapBytes * kTensorMapBytes;
}
constexpr int64_t pointer_array_bytes(int64_t groups) {
  return pointer_array_maps_offset(groups) + groups * kTensorMapBytes;
}

}  // namespace transformer_plugin::gemm
