// Three passes, none of which sorts: count the experts in each chunk of the indices; scan the counts over
// chunks and the padded totals over experts; give each index its row, which is its expert's first row, plus
// the expert's count in earlier chunks, plus its rank inside the chunk.
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

// One block a chunk. Integer atomics: the counts do not depend on their order.
template <typename Index>
__global__ void count_chunks_kernel(AssignSlotsArgs args) {
  __shared__ int32_t counts[kMaxExperts];
  for (int64_t chunk = blockIdx.x; chunk < args.chunks; chunk += gridDim.x) {
    for (int e = threadIdx.x; e < args.experts; e += kCountThreads) counts[e] = 0;
    __syncthreads();
    const int64_t begin = chunk * args.chunk_size;
    const int64_t items = args.tokens * args.topk;
    const int64_t end = begin + args.chunk_size < items ? begin + args.chunk_size : items;
    for (int64_t i = begin + threadIdx.x; i < end; i += kCountThreads) {
      const int expert = local_expert(static_cast<const Index*>(args.indices)[i], args.first, args.experts);
      if (expert >= 0) atomicAdd(&counts[expert], 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < args.experts; e += kCountThreads) {
      args.chunk_counts[chunk * args.experts + e] = counts[e];
    }
    __syncthreads();
  }
}

// Replaces the counts of expert `e` by their exclusive sums over chunks; returns the whole sum. Loads come
// several at a time, because each waits long.
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

// One block.
__global__ void scan_kernel(AssignSlotsArgs args) {
  __shared__ int64_t ends[kScanThreads];
  const int e = threadIdx.x;
  const bool is_expert = e < args.experts;
  const int64_t count = is_expert ? scan_chunks(args, e) : 0;
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
  if (is_expert) {
    args.starts[e] = start;
    args.group_sizes[e] =
        (end < args.capacity ? end : args.capacity) - (start < args.capacity ? start : args.capacity);
  }
  if (e == kScanThreads - 1) *args.total = end;
}

// One warp a chunk, 32 indices at a time in order; `next` holds how many of each expert came before in all
// chunks.
template <typename Index>
__global__ void assign_kernel(AssignSlotsArgs args) {
  __shared__ int32_t next[kMaxExperts];
  const unsigned lane = threadIdx.x;
  const int64_t items = args.tokens * args.topk;
  for (int64_t chunk = blockIdx.x; chunk < args.chunks; chunk += gridDim.x) {
    for (int e = lane; e < args.experts; e += kWarpSize)
      next[e] = args.chunk_counts[chunk * args.experts + e];
    __syncwarp();
    const int64_t begin = chunk * args.chunk_size;
    const int64_t end = begin + args.chunk_size < items ? begin + args.chunk_size : items;
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
      if (i >= end) continue;  // only in the last round of the chunk, and nothing below is collective
      const int64_t row = expert >= 0 ? args.starts[expert] + before + __popc(earlier) : args.capacity;
      const bool kept = row < args.capacity;
      args.slot[i] = kept ? static_cast<int32_t>(row) : -1;
      if (kept) {
        args.source[row] = static_cast<int32_t>(i / args.topk);
        args.source_k[row] = static_cast<int32_t>(i % args.topk);
      }
    }
    __syncwarp();
  }
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

void fill_bytes(void* data, int value, int64_t bytes, cudaStream_t stream) {
  if (bytes == 0) return;
  const cudaError_t error = cudaMemsetAsync(data, value, static_cast<size_t>(bytes), stream);
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("transformer_plugin: memset failed: ") + cudaGetErrorString(error));
  }
}

}  // namespace

void launch_assign_slots(const AssignSlotsArgs& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  fill_bytes(args.source, 0xff, args.capacity * 4, cuda_stream);  // all bits set: -1
  fill_bytes(args.source_k, 0xff, args.capacity * 4, cuda_stream);
  const bool has_items = args.chunks > 0;
  const unsigned blocks = grid_size(args.chunks, 1);
  if (has_items) {
    if (args.indices_are_int64) {
      count_chunks_kernel<int64_t><<<blocks, kCountThreads, 0, cuda_stream>>>(args);
    } else {
      count_chunks_kernel<int32_t><<<blocks, kCountThreads, 0, cuda_stream>>>(args);
    }
    check_launch("count_chunks_kernel");
  }
  scan_kernel<<<1, kScanThreads, 0, cuda_stream>>>(args);
  check_launch("scan_kernel");
  if (!has_items) return;
  if (args.indices_are_int64) {
    assign_kernel<int64_t><<<blocks, kWarpSize, 0, cuda_stream>>>(args);
  } else {
    assign_kernel<int32_t><<<blocks, kWarpSize, 0, cuda_stream>>>(args);
  }
  check_launch("assign_kernel");
}

void launch_count_tokens(const CountTokensArgs& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  fill_bytes(args.counts, 0, args.experts * 8, cuda_stream);
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
