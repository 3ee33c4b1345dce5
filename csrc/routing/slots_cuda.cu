// CUDA kernels that assign slots (routing/slots_args.h): indices [tokens, topk] of int32 or int64.
//
// Slots are assigned without sorting, in two kernels over chunks of the indices:
//   count_chunks_kernel   one block of 512 threads per chunk: counts of each expert. It also marks all rows
//                         as unused.
//   assign_kernel         one block of 1024 threads per chunk: each warp counts its part of the chunk. The
//                         thread of each expert adds the counts of earlier chunks and warps to the expert's
//                         first row, which all blocks compute. Then each warp gives its indices rows, in
//                         order. Shared memory: one counter per warp and expert, with fewer warps for many
//                         experts.
// A small problem is one chunk, for which assign_kernel does everything.
#include <algorithm>

#include "common/expert_index.cuh"
#include "common/launch.cuh"
#include "common/scan.cuh"
#include "routing/local_expert.cuh"
#include "routing/slots_args.h"

namespace transformer_plugin::routing {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kCountThreads = 512;
constexpr int kLoads = 4;  // indices that a thread of count_chunks_kernel loads at once
constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kCounters = 8192;
constexpr int kMostParts = 16;  // in which the counts of one expert are added in parallel
static_assert(kMaxExperts <= kThreads && kMaxExperts <= kCounters, "one thread and one counter per expert");

// Sets count 4-byte words at an address that is a multiple of 16, as those of new tensors are.
__device__ __forceinline__ void fill(void* words, int64_t count, int value) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int4* vectors = static_cast<int4*>(words);
  for (int64_t i = first; i < count / 4; i += step) vectors[i] = make_int4(value, value, value, value);
  if (first < count % 4) static_cast<int*>(words)[count / 4 * 4 + first] = value;
}

// Marks all rows as unused; assign_kernel then overwrites the used ones.
__device__ __forceinline__ void clear_rows(const AssignSlotsArgs& args) {
  fill(args.source, args.capacity, -1);
  if (args.source_k) fill(args.source_k, args.capacity, -1);
  if (args.probs) fill(args.probs, args.capacity, 0);
}

// The number of the i-th index's expert in the layout, or -1. A wrong index is reported if `report` is true, which it
// is in one pass over the indices.
template <typename Index, bool report>
__device__ __forceinline__ int expert_at(const AssignSlotsArgs& args, uint32_t i, uint32_t end) {
  if (i >= end) return -1;
  const Index index = static_cast<const Index*>(args.indices)[i];
  if constexpr (report) report_wrong_expert(args.range, static_cast<int64_t>(index), i);
  return local_expert(index, args.first, args.experts);
}

// One block per chunk. Integer atomics are deterministic.
template <typename Index>
__global__ void __launch_bounds__(kCountThreads) count_chunks_kernel(AssignSlotsArgs args) {
  __shared__ int32_t counts[kMaxExperts];
  pdl_launch_dependents();
  clear_rows(args);
  const int64_t chunk = blockIdx.x;
  if (chunk >= args.chunks) return;
  for (int e = threadIdx.x; e < args.experts; e += kCountThreads) counts[e] = 0;
  __syncthreads();
  const auto begin = static_cast<uint32_t>(chunk * args.chunk_size);
  const auto end = static_cast<uint32_t>(args.chunk_end(begin));
  for (uint32_t first = begin + threadIdx.x; first < end; first += kLoads * kCountThreads) {
    int experts[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u)
      experts[u] = expert_at<Index, true>(args, first + u * kCountThreads, end);
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      if (experts[u] >= 0) atomicAdd(&counts[experts[u]], 1);
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < args.experts; e += kCountThreads) {
    args.chunk_counts[chunk * args.experts + e] = counts[e];
  }
}

// How often an expert occurs in earlier chunks, and in all.
struct Counts {
  int32_t before;
  int32_t total;
};

// The counts of expert threadIdx.x; called by all threads. Several threads add the chunks of an expert.
__device__ __forceinline__ Counts add_chunks(const AssignSlotsArgs& args, Counts* partial) {
  const int experts = static_cast<int>(args.experts);
  const int thread = threadIdx.x;
  const int parts = experts > 0 ? min(kMostParts, kThreads / experts) : 0;
  if (thread < parts * experts) {
    const int e = thread % experts;
    Counts sum{0, 0};
#pragma unroll 4
    for (int c = thread / experts; c < args.chunks; c += parts) {
      const int32_t count = args.chunk_counts[c * experts + e];
      sum.total += count;
      sum.before += c < static_cast<int>(blockIdx.x) ? count : 0;
    }
    partial[thread] = sum;
  }
  __syncthreads();
  Counts sum{0, 0};
  for (int i = thread; thread < experts && i < parts * experts; i += experts) {
    sum.total += partial[i].total;
    sum.before += partial[i].before;
  }
  return sum;
}

// The first row of expert threadIdx.x with `count` indices, but at most the capacity; called by all threads.
// The first block writes the sizes.
__device__ __forceinline__ uint32_t first_row(const AssignSlotsArgs& args, int32_t count,
                                              BlockScan<int64_t, kThreads>& scan) {
  const auto alignment = static_cast<uint32_t>(args.alignment);
  const int64_t padded = int64_t{(static_cast<uint32_t>(count) + alignment - 1) / alignment} * alignment;
  int64_t total;
  const int64_t end = scan.inclusive(padded, total);
  const int64_t kept_end = end < args.capacity ? end : args.capacity;
  const int64_t start = end - padded < args.capacity ? end - padded : args.capacity;
  if (blockIdx.x == 0) {
    if (threadIdx.x < args.experts) args.group_sizes[threadIdx.x] = kept_end - start;
    if (threadIdx.x == 0) *args.total = total;
  }
  return static_cast<uint32_t>(start);
}

// Calls visit(i, expert, same) for 32 indices at a time, in order, by all lanes of a warp. `same` are the
// lanes that have the same expert; past the end the expert is -1. Indices are fewer than 2^31.
template <typename Index, bool report, typename Visit>
__device__ __forceinline__ void visit_indices(const AssignSlotsArgs& args, uint32_t begin, uint32_t end,
                                              Visit visit) {
  uint32_t i = begin + threadIdx.x % kWarpSize;
  int expert = expert_at<Index, report>(args, i, end);
  for (uint32_t first = begin; first < end; first += kWarpSize) {
    const int next = expert_at<Index, report>(args, i + kWarpSize, end);
    visit(i, expert, __match_any_sync(kAllLanes, expert));
    i += kWarpSize;
    expert = next;
  }
}

// Gives index `i` of expert `expert` a row, if it has one.
__device__ __forceinline__ void assign_row(const AssignSlotsArgs& args, uint32_t i, int expert,
                                           uint32_t row) {
  const bool kept = expert >= 0 && row < static_cast<uint32_t>(args.capacity);
  args.slot[i] = kept ? static_cast<int32_t>(row) : -1;
  if (!kept) return;
  const auto topk = static_cast<uint32_t>(args.topk);
  const uint32_t token = i / topk;
  args.source[row] = static_cast<int32_t>(token);
  if (args.source_k) args.source_k[row] = static_cast<int32_t>(i - token * topk);
  if (args.probs) args.probs[row] = args.weights[i];
}

// One block per chunk. `alone`: there is one chunk, which count_chunks_kernel has not counted.
template <typename Index, bool alone>
__global__ void __launch_bounds__(kThreads) assign_kernel(AssignSlotsArgs args) {
  // For each warp and expert: how often the warp has the expert, then the expert's next row in the warp.
  __shared__ uint32_t rows[kCounters];
  __shared__ Counts partial[kThreads];
  __shared__ BlockScan<int64_t, kThreads> scan;
  const int experts = static_cast<int>(args.experts);
  const int warps = experts > 0 ? min(kWarps, kCounters / experts) : kWarps;
  const int warp = threadIdx.x / kWarpSize;
  const unsigned lower_lanes = (1u << threadIdx.x % kWarpSize) - 1;
  const auto chunk_begin = static_cast<uint32_t>(blockIdx.x * args.chunk_size);
  const auto chunk_end = static_cast<uint32_t>(args.chunk_end(chunk_begin));
  const uint32_t per_warp = ceil_div(ceil_div(args.chunk_size, warps), kWarpSize) * kWarpSize;
  const uint32_t begin = warp < warps ? min(chunk_begin + warp * per_warp, chunk_end) : chunk_end;
  const uint32_t end = min(begin + per_warp, chunk_end);
  uint32_t* own = rows + warp * experts;

  if (alone) clear_rows(args);
  for (int i = threadIdx.x; i < warps * experts; i += kThreads) rows[i] = 0;
  __syncthreads();
  visit_indices<Index, alone>(args, begin, end, [&](uint32_t, int expert, unsigned same) {
    if (expert >= 0 && (same & lower_lanes) == 0) own[expert] += __popc(same);
    __syncwarp();
  });
  __syncthreads();

  pdl_wait();
  const int e = threadIdx.x;
  Counts counts{0, 0};
  if constexpr (alone) {
    for (int i = e; e < experts && i < warps * experts; i += experts) counts.total += rows[i];
  } else {
    counts = add_chunks(args, partial);
  }
  uint32_t next = first_row(args, counts.total, scan) + counts.before;
#pragma unroll 4
  for (int i = e; e < experts && i < warps * experts; i += experts) {
    const uint32_t count = rows[i];
    rows[i] = next;
    next += count;
  }
  __syncthreads();

  visit_indices<Index, false>(args, begin, end, [&](uint32_t i, int expert, unsigned same) {
    const uint32_t before = expert >= 0 ? own[expert] : 0;
    __syncwarp();
    if (expert >= 0 && (same & lower_lanes) == 0) own[expert] = before + __popc(same);
    __syncwarp();
    if (i < end) assign_row(args, i, expert, before + __popc(same & lower_lanes));
  });
}

// Rows of `source` that a thread clears.
constexpr int64_t kRowsPerThread = 16;

template <typename Index>
void launch_assign(AssignSlotsArgs args, cudaStream_t stream) {
  if (args.are_few()) {
    args.chunk_size = args.items();
    assign_kernel<Index, true><<<1, kThreads, 0, stream>>>(args);
    return check_launch("assign_kernel");
  }
  const unsigned blocks = grid_size(args.chunks, 1);
  const unsigned clearing_blocks = grid_size(args.capacity, kCountThreads * kRowsPerThread);
  count_chunks_kernel<Index><<<std::max(blocks, clearing_blocks), kCountThreads, 0, stream>>>(args);
  check_launch("count_chunks_kernel");
  launch_pdl(assign_kernel<Index, false>, blocks, kThreads, 0, stream, args);
  check_launch("assign_kernel");
}

}  // namespace

void launch_assign_slots(const AssignSlotsArgs& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  args.indices_are_int64 ? launch_assign<int64_t>(args, cuda_stream)
                         : launch_assign<int32_t>(args, cuda_stream);
}

}  // namespace transformer_plugin::routing
