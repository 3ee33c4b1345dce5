// For a list of matrices: writes their addresses, and a tensor map for each, to device memory.
//
//   to[i] = addresses[i], maps[i] = map with global address addresses[i]   for i < count
//
// The addresses are kernel arguments, so no host-to-device copy is needed and a CUDA graph can contain the
// launch. One warp for each matrix, 4 warps a block; 512 bytes of shared memory, where tensor maps are
// modified (tensormap.replace).
#include <algorithm>

#include "common/launch.cuh"
#include "common/shared_memory.cuh"
#include "gemm/sm90/tensor_map.h"

namespace transformer_plugin::gemm {
namespace {

static_assert(sizeof(CUtensorMap) == kTensorMapBytes, "size of a tensor map");

constexpr int kThreads = 128;
constexpr int kMatricesPerBlock = kThreads / kWarpSize;
constexpr int kFewPointers = 128;  // up to so many, a kernel with 1 KiB of arguments instead of 8 KiB is used

template <int max_count>
struct Addresses {
  const void* values[max_count];
};

// Writes a copy of `map` with another address, by one warp. tensormap.cp_fenceproxy publishes it to the
// tensor map proxy.
__device__ __forceinline__ void write_map(const CUtensorMap& map, const void* address, CUtensorMap* to) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ alignas(128) CUtensorMap maps[kMatricesPerBlock];
  const int lane = threadIdx.x % kWarpSize;
  CUtensorMap* shared_map = &maps[threadIdx.x / kWarpSize];
  reinterpret_cast<uint32_t*>(shared_map)[lane] = reinterpret_cast<const uint32_t*>(&map)[lane];
  __syncwarp();
  if (lane == 0) {
    asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(
                     shared_address(shared_map)),
                 "l"(address)
                 : "memory");
  }
  __syncwarp();
  asm volatile(
      "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], "
      "128;" ::"l"(to),
      "r"(shared_address(shared_map))
      : "memory");
#endif
}

template <int max_count>
__global__ void __launch_bounds__(kThreads)
    pointer_array_kernel(const __grid_constant__ CUtensorMap map,
                         const __grid_constant__ Addresses<max_count> addresses, int count, const void** to,
                         CUtensorMap* maps) {
  pdl_wait();  // the kernel before may still read the old contents
  pdl_launch_dependents();
  const int matrix = static_cast<int>(blockIdx.x) * kMatricesPerBlock + threadIdx.x / kWarpSize;
  if (matrix >= count) return;
  const void* address = addresses.values[matrix];
  if (threadIdx.x % kWarpSize == 0) to[matrix] = address;
  if (maps) write_map(map, address, maps + matrix);
}

template <int max_count>
void launch(const PointerArray& list, int64_t groups, const CUtensorMap& map, CUtensorMap* maps,
            void* stream) {
  Addresses<max_count> addresses{};
  std::copy_n(list.addresses, groups, addresses.values);
  launch_pdl(pointer_array_kernel<max_count>, grid_size(groups, kMatricesPerBlock), kThreads, 0,
             static_cast<cudaStream_t>(stream), map, addresses, static_cast<int>(groups),
             static_cast<const void**>(list.workspace), maps);
  check_launch("pointer_array_kernel");
}

}  // namespace

const CUtensorMap* launch_pointer_array(const PointerArray& list, int64_t groups, const CUtensorMap* map,
                                        void* stream) {
  if (!list.addresses) return nullptr;
  auto* maps = map ? reinterpret_cast<CUtensorMap*>(static_cast<uint8_t*>(list.workspace) +
                                                    pointer_array_maps_offset(groups))
                   : nullptr;
  const auto start = groups <= kFewPointers ? launch<kFewPointers> : launch<kMaxPointers>;
  start(list, groups, map ? *map : CUtensorMap{}, maps, stream);
  return maps;
}

}  // namespace transformer_plugin::gemm
