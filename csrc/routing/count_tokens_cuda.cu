// CUDA kernels that count the tokens of each expert (routing/slots_args.h): indices of int32 or int64.
//   count_in_cluster_kernel   up to 2^20 indices: one cluster of up to 8 blocks of 1024 threads. Each block
//                             counts a part of the indices in several copies of the counters, which its warps
//                             share. Then the blocks add each other's counts through distributed shared
//                             memory. One block, without a cluster, serves few indices on any GPU.
//   count_in_grid_kernel      more indices: blocks of 256 threads add to counters in global memory
// Integer atomics are deterministic.
#include "common/expert_index.cuh"
#include "common/launch.cuh"
#include "common/shared_memory.cuh"
#include "routing/block_counts.cuh"
#include "routing/local_expert.cuh"
#include "routing/slots_args.h"

namespace transformer_plugin::routing {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kCounters = 8192;
constexpr int kVectors = 4;          // that a thread loads at once
constexpr unsigned kMostBlocks = 8;  // of a cluster on any GPU that has clusters
constexpr int64_t kItemsOfBlock = 4096;
constexpr int64_t kMostInOneBlock = 16384;
constexpr int64_t kMostInCluster = 1 << 20;
constexpr int kGridThreads = 256;

// Waits for all blocks of the cluster, and for what they wrote to shared memory.
__device__ __forceinline__ void cluster_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
#endif
}

// The value at the same address in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ int32_t load_of_block(const int32_t* address, unsigned rank) {
  int32_t value = *address;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .u32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.s32 %0, [remote];\n}"
      : "=r"(value)
      : "r"(shared_address(address)), "r"(rank)
      : "memory");
#endif
  return value;
}

template <typename Index>
__device__ __forceinline__ void count_index(const CountTokensArgs& args, Index index, int64_t place,
                                            int32_t* counts) {
  report_wrong_expert(args.range, static_cast<int64_t>(index), place);
  const int expert = local_expert(index, 0, args.experts);
  if (expert >= 0) atomicAdd(&counts[expert], 1);
}

// Counts the indices of this block: vectors of 16 bytes where the address allows them, then the rest.
template <typename Index>
__device__ __forceinline__ void count_part(const CountTokensArgs& args, int32_t* counts) {
  constexpr int kPerVector = static_cast<int>(sizeof(int4) / sizeof(Index));
  const Index* indices = static_cast<const Index*>(args.indices);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const bool aligned = reinterpret_cast<uint64_t>(indices) % sizeof(int4) == 0;
  const int64_t vectors = aligned ? args.numel / kPerVector : 0;
  for (int64_t v = first; v < vectors; v += kVectors * step) {
    int4 words[kVectors];
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (v + u * step < vectors) words[u] = reinterpret_cast<const int4*>(indices)[v + u * step];
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (v + u * step >= vectors) continue;
      Index values[kPerVector];
      memcpy(values, &words[u], sizeof(int4));
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) {
        count_index(args, values[i], (v + u * step) * kPerVector + i, counts);
      }
    }
  }
  for (int64_t i = vectors * kPerVector + first; i < args.numel; i += step) {
    count_index(args, indices[i], i, counts);
  }
}

// One cluster, which is the whole grid.
template <typename Index>
__global__ void __launch_bounds__(kThreads) count_in_cluster_kernel(CountTokensArgs args) {
  __shared__ int32_t counts[kCounters];  // copies of [experts]
  const int experts = static_cast<int>(args.experts);
  const int copies = min(kWarps, kCounters / experts);
  for (int i = threadIdx.x; i < copies * experts; i += kThreads) counts[i] = 0;
  __syncthreads();
  count_part<Index>(args, counts + threadIdx.x / kWarpSize % copies * experts);
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += kThreads) {
    int32_t sum = 0;
    for (int c = 0; c < copies; ++c) sum += counts[c * experts + e];
    counts[e] = sum;
  }
  const bool many = gridDim.x > 1;
  many ? cluster_sync() : __syncthreads();
  for (int e = blockIdx.x * kThreads + threadIdx.x; e < experts; e += gridDim.x * kThreads) {
    int64_t sum = 0;
    for (unsigned b = 0; b < gridDim.x; ++b) sum += many ? load_of_block(&counts[e], b) : counts[e];
    args.counts[e] = sum;
  }
  if (many) cluster_sync();  // the shared memory of a block must exist until all have read it
}

template <typename Index>
__global__ void count_in_grid_kernel(CountTokensArgs args) {
  __shared__ int32_t counts[kMaxExperts];
  clear_counts(counts, args.experts);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kGridThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kGridThreads + threadIdx.x; i < args.numel; i += step) {
    count_index(args, static_cast<const Index*>(args.indices)[i], i, counts);
  }
  add_counts(counts, args.experts, args.counts);
}

// A power of two, at most kMostBlocks.
unsigned cluster_size(int64_t numel) {
  unsigned blocks = 1;
  while (blocks < kMostBlocks && blocks * kItemsOfBlock < numel) blocks *= 2;
  return blocks;
}

template <typename Index>
void count_in_cluster(const CountTokensArgs& args, unsigned blocks, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = blocks;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = blocks > 1 ? 1 : 0;
  cudaLaunchKernelEx(&config, count_in_cluster_kernel<Index>, args);
  check_launch("count_in_cluster_kernel");
}

template <typename Index>
void launch(const CountTokensArgs& args, cudaStream_t stream) {
  // Kernels that contain PDL instructions contain those of clusters, too.
  const bool has_clusters = supports_pdl();
  if (args.numel <= (has_clusters ? kMostInCluster : kMostInOneBlock)) {
    return count_in_cluster<Index>(args, has_clusters ? cluster_size(args.numel) : 1, stream);
  }
  set_to_zero(args.counts, args.experts, stream);
  constexpr int64_t kItemsPerThread = 16;
  const unsigned blocks = grid_size(args.numel, kGridThreads * kItemsPerThread);
  count_in_grid_kernel<Index><<<blocks, kGridThreads, 0, stream>>>(args);
  check_launch("count_in_grid_kernel");
}

}  // namespace

void launch_count_tokens(const CountTokensArgs& args, void* stream) {
  if (args.experts == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  args.indices_are_int64 ? launch<int64_t>(args, cuda_stream) : launch<int32_t>(args, cuda_stream);
}

}  // namespace transformer_plugin::routing
