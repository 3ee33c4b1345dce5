// CUDA kernels that assign slots (routing/slots_args.h) and count tokens per expert: indices [tokens, topk]
// of int32 or int64.
//
// Slots are assigned without sorting, in three kernels:
//   count_chunks_kernel   one block of 256 threads per chunk of the indices: counts of each expert
//   scan_kernel           one block of 1024 threads, one per expert: scans the counts over the chunks and the
//                         padded totals over the experts
//   assign_kernel         one warp per chunk: row = first row of the expert + its count in earlier chunks
//                         + its rank in the chunk
// A small problem runs these steps in one block (assign_small_kernel). Shared memory: one counter per expert.
#include <algorithm>

#include "common/launch.cuh"
#include "routing/slots_args.h"

namespace transformer_plugin::routing {
namespace {

constexpr int kCountThreads = 256;
constexpr int kScanThreads = 1024;
constexpr int kScanUnroll = 8;
static_assert(kMaxExperts <= kScanThreads, "one thread of the scan has one expert");

template <typename Index>
__device__ __forceinline__ int local_expert(Index index, int64_t first, int64_t experts) {
  const int64_t expert = static_cast<int64_t>(index);
  return expert >= first && expert - first < experts ? static_cast<int>(expert - first) : -1;
}

// Marks all rows as unused; assign_chunk then overwrites the used ones.
__device__ __forceinline__ void clear_sources(const AssignSlotsArgs& args) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < args.capacity;
       i += step) {
    args.source[i] = -1;
    if (args.source_k) args.source_k[i] = -1;
    if (args.probs) args.probs[i] = 0.0f;
  }
}

// Counts the experts in a chunk; called by all threads of the block. Integer atomics are deterministic.
template <typename Index>
__device__ __forceinline__ void count_chunk(const AssignSlotsArgs& args, int64_t begin, int64_t end,
                                            int32_t* counts) {
  for (int e = threadIdx.x; e < args.experts; e += blockDim.x) counts[e] = 0;
  __syncthreads();
  for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
    const int expert = local_expert(static_cast<const Index*>(args.indices)[i], args.first, args.experts);
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
}

// One block per chunk.
template <typename Index>
__global__ void count_chunks_kernel(AssignSlotsArgs args) {
  __shared__ int32_t counts[kMaxExperts];
  clear_sources(args);
  for (int64_t chunk = blockIdx.x; chunk < args.chunks; chunk += gridDim.x) {
    const int64_t begin = chunk * args.chunk_size;
    count_chunk<Index>(args, begin, args.chunk_end(begin), counts);
    for (int e = threadIdx.x; e < args.experts; e += kCountThreads) {
      args.chunk_counts[chunk * args.experts + e] = counts[e];
    }
    __syncthreads();
  }
}

// Replaces the counts of expert `e` by their exclusive sums over the chunks; returns the total. Several loads
// are issued together, because their latency is long.
__device__ int64_t scan_chunks(const AssignSlotsArgs& args, int e) {
  int32_t sum = 0;
  for (int64_t start = 0; start < args.chunks; start += kScanUnroll) {
    int32_t counts[kScanUnroll];
#pragma unroll
    for (int u = 0; u < kScanUnroll; ++u) {
      counts[u] = start + u < args.chunks ? args.chunk_counts[(start + u) * args.experts + e] : 0;
    }
#pragma unroll
    for (int u = 0; u < kScanUnroll; ++u) {
      if (start + u < args.chunks) args.chunk_counts[(start + u) * args.experts + e] = sum;
      sum += counts[u];
    }
  }
  return sum;
}

// The first row and the number of rows of each expert; called by a block of kScanThreads threads, one per
// expert.
__device__ __forceinline__ void scan_experts(const AssignSlotsArgs& args, int64_t count, int64_t* starts) {
  __shared__ int64_t ends[kScanThreads];
  const int e = threadIdx.x;
  const int64_t padded = (count + args.alignment - 1) / args.alignment * args.alignment;
  ends[e] = padded;
  __syncthreads();
  for (int distance = 1; distance < kScanThreads; distance *= 2) {
    const int64_t left = e >= distance ? ends[e - distance] : 0;
    __syncthreads();
    ends[e] += left;
    __syncthreads();
  }
  const int64_t end = ends[e];
  const int64_t start = end - padded;
  if (e < args.experts) {
    starts[e] = start;
    args.group_sizes[e] =
        (end < args.capacity ? end : args.capacity) - (start < args.capacity ? start : args.capacity);
  }
  if (e == kScanThreads - 1) *args.total = end;
}

// Scans the counts over the chunks, then over the experts. One block.
__global__ void scan_kernel(AssignSlotsArgs args) {
  const int e = threadIdx.x;
  scan_experts(args, e < args.experts ? scan_chunks(args, e) : 0, args.starts);
}

// Assigns slots to a chunk in one warp, 32 indices at a time, in order. `next[e]`: how many indices before
// these, in all chunks, have expert e.
template <typename Index>
__device__ __forceinline__ void assign_chunk(const AssignSlotsArgs& args, int64_t begin, int64_t end,
                                             const int64_t* starts, int32_t* next) {
  const unsigned lane = threadIdx.x;
  for (int64_t first_item = begin; first_item < end; first_item += kWarpSize) {
    const int64_t i = first_item + lane;
    const int expert =
        i < end ? local_expert(static_cast<const Index*>(args.indices)[i], args.first, args.experts) : -1;
    const unsigned same = __match_any_sync(0xffffffffu, expert);
    const unsigned earlier = same & ((1u << lane) - 1u);
    const int32_t before = expert >= 0 ? next[expert] : 0;
    __syncwarp();
    if (expert >= 0 && earlier == 0) next[expert] = before + __popc(same);
    __syncwarp();
    if (i >= end) continue;  // only in the last iteration of a chunk; no warp-wide operation follows
    const int64_t row = expert >= 0 ? starts[expert] + before + __popc(earlier) : args.capacity;
    const bool kept = row < args.capacity;
    args.slot[i] = kept ? static_cast<int32_t>(row) : -1;
    if (kept) {
      args.source[row] = static_cast<int32_t>(i / args.topk);
      if (args.source_k) args.source_k[row] = static_cast<int32_t>(i % args.topk);
      if (args.probs) args.probs[row] = args.weights[i];
    }
  }
}

// One warp per chunk.
template <typename Index>
__global__ void assign_kernel(AssignSlotsArgs args) {
  __shared__ int32_t next[kMaxExperts];
  for (int64_t chunk = blockIdx.x; chunk < args.chunks; chunk += gridDim.x) {
    for (int e = threadIdx.x; e < args.experts; e += kWarpSize)
      next[e] = args.chunk_counts[chunk * args.experts + e];
    __syncwarp();
    const int64_t begin = chunk * args.chunk_size;
    assign_chunk<Index>(args, begin, args.chunk_end(begin), args.starts, next);
    __syncwarp();
  }
}

// All three steps in one block; all indices are one chunk.
template <typename Index>
__global__ void __launch_bounds__(kScanThreads) assign_small_kernel(AssignSlotsArgs args) {
  __shared__ int32_t counts[kMaxExperts];
  __shared__ int64_t starts[kMaxExperts];
  const int e = threadIdx.x;
  clear_sources(args);
  count_chunk<Index>(args, 0, args.items(), counts);
  scan_experts(args, e < args.experts ? counts[e] : 0, starts);
  if (e < args.experts) counts[e] = 0;
  __syncthreads();
  if (e < kWarpSize) assign_chunk<Index>(args, 0, args.items(), starts, counts);
}

template <typename Index>
__global__ void count_tokens_kernel(CountTokensArgs args) {
  __shared__ int32_t counts[kMaxExperts];
  for (int e = threadIdx.x; e < args.experts; e += kCountThreads) counts[e] = 0;
  __syncthreads();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kCountThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kCountThreads + threadIdx.x; i < args.numel;
       i += step) {
    const int expert = local_expert(static_cast<const Index*>(args.indices)[i], 0, args.experts);
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < args.experts; e += kCountThreads) {
    if (counts[e] != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(args.counts + e),
                static_cast<unsigned long long>(counts[e]));
    }
  }
}

void zero(int64_t* counts, int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  const cudaError_t error = cudaMemsetAsync(counts, 0, static_cast<size_t>(count) * sizeof(int64_t), stream);
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("transformer_plugin: memset failed: ") + cudaGetErrorString(error));
  }
}

// Rows of `source` that a thread clears.
constexpr int64_t kRowsPerThread = 16;

template <typename Index>
void launch_assign(const AssignSlotsArgs& args, cudaStream_t stream) {
  if (args.are_few()) {
    assign_small_kernel<Index><<<1, kScanThreads, 0, stream>>>(args);
    return check_launch("assign_small_kernel");
  }
  const unsigned blocks = grid_size(args.chunks, 1);
  const unsigned clearing_blocks = grid_size(args.capacity, kCountThreads * kRowsPerThread);
  count_chunks_kernel<Index><<<std::max(blocks, clearing_blocks), kCountThreads, 0, stream>>>(args);
  check_launch("count_chunks_kernel");
  scan_kernel<<<1, kScanThreads, 0, stream>>>(args);
  check_launch("scan_kernel");
  if (args.chunks == 0) return;
  assign_kernel<Index><<<blocks, kWarpSize, 0, stream>>>(args);
  check_launch("assign_kernel");
}

}  // namespace

void launch_assign_slots(const AssignSlotsArgs& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  args.indices_are_int64 ? launch_assign<int64_t>(args, cuda_stream)
                         : launch_assign<int32_t>(args, cuda_stream);
}

void launch_count_tokens(const CountTokensArgs& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  zero(args.counts, args.experts, cuda_stream);
  if (args.numel == 0 || args.experts == 0) return;
  constexpr int64_t kItemsPerThread = 16;
  const unsigned blocks = grid_size(args.numel, kCountThreads * kItemsPerThread);
  if (args.indices_are_int64) {
    count_tokens_kernel<int64_t><<<blocks, kCountThreads, 0, cuda_stream>>>(args);
  } else {
    count_tokens_kernel<int32_t><<<blocks, kCountThreads, 0, cuda_stream>>>(args);
  }
  check_launch("count_tokens_kernel");
}

}  // namespace transformer_plugin::routing
