// Matrices of groups that lie each at an address of its own, and how kernels find them.
#pragma once

#include <cstdint>

namespace transformer_plugin::gemm {

// At most so many: their addresses travel in the arguments of a launch.
inline constexpr int64_t kListMatrices = 1024;

// One matrix for each group, all of one size and one row stride. The launch before the product's (launch_matrix_list in
// gemm/sm90/tensor_map.h) writes what its kernel reads into `room`: the addresses, and on Hopper from list_maps_at on a tensor
// map of each matrix.
struct MatrixList {
  const void* const* addresses;  // [groups], on the host; null where the matrices are one stack
  void* room;                    // list_room(groups) bytes on the device, at a multiple of 128
};

inline constexpr int64_t kTensorMapBytes = 128;  // their addresses are multiples of it too
constexpr int64_t list_maps_at(int64_t groups) {
  const int64_t bytes = groups * static_cast<int64_t>(sizeof(void*));
  return (bytes + kTensorMapBytes - 1) / kTensorMapBytes * kTensorMapBytes;
}
constexpr int64_t list_room(int64_t groups) { return list_maps_at(groups) + groups * kTensorMapBytes; }

}  // namespace transformer_plugin::gemm
