// Kernels of plan: packing of the indices (PackIndicesArgs) and counting of rows (CountRowsArgs).
//
// pack_indices_kernel: one element of packed [max_tokens, topk] a thread and step, grid-stride, 256 threads a
// block.
// count_experts_kernel: counts[e] = number of indices equal to e, one index a thread and step, grid-stride.
// require_rows_kernel: one block of 256 threads; required[r] = sum over rank r's experts of their counts,
// each rounded up to the alignment. No shared memory.
// report_tokens_kernel: one thread; there is one number for each rank.
#include "common/expert_index.cuh"
#include "common/launch.cuh"
#include "expert_parallel/plan_args.h"

namespace transformer_plugin::expert_parallel {
namespace {

constexpr int kThreads = 256;

template <typename Index>
__global__ void pack_indices_kernel(PackIndicesArgs args) {
  const int64_t used = args.tokens * args.topk;
  const int64_t total = args.max_tokens * args.topk;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total; i += step) {
    args.packed[i] =
        i < used ? packed_index(static_cast<int64_t>(static_cast<const Index*>(args.indices)[i])) : kNoExpert;
  }
}

// Integer atomics: the result does not depend on their order.
__global__ void count_experts_kernel(CountRowsArgs args) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < args.numel; i += step) {
    const int32_t expert = args.indices[i];
    report_wrong_expert(args.range, expert, i);
    if (expert >= 0 && expert < args.experts) atomicAdd(args.counts + expert, 1);
  }
}

// One thread a rank; then thread 0 compares the largest with the capacity. `report` is host memory, written
// only on overflow.
__global__ void require_rows_kernel(CountRowsArgs args) {
  const int64_t local = args.experts / args.ranks;
  for (int64_t r = threadIdx.x; r < args.ranks; r += kThreads) {
    int64_t rows = 0;
    for (int64_t e = 0; e < local; ++e) rows += padded_rows(args.counts[r * local + e], args.alignment);
    args.required[r] = rows;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  int64_t largest = 0;
  for (int64_t r = 0; r < args.ranks; ++r) largest = args.required[r] > largest ? args.required[r] : largest;
  *args.overflow = largest > args.capacity;
  if (args.report && largest > args.capacity) {
    *static_cast<volatile int64_t*>(args.report) = largest;
    __threadfence_system();
  }
}

__global__ void report_tokens_kernel(ReportTokensArgs args) {
  int64_t largest = 0;
  for (int64_t r = 0; r < args.ranks; ++r)
    largest = args.required_tokens[r] > largest ? args.required_tokens[r] : largest;
  if (largest <= args.bound) return;
  *static_cast<volatile int64_t*>(args.report) = -largest;
  __threadfence_system();
}

}  // namespace

void launch_report_tokens(const ReportTokensArgs& args, void* stream) {
  report_tokens_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(args);
  check_launch("report_tokens_kernel");
}

void launch_pack_indices(const PackIndicesArgs& args, void* stream) {
  const int64_t total = args.max_tokens * args.topk;
  if (total == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (args.indices_are_int64) {
    pack_indices_kernel<int64_t><<<grid_size(total, kThreads), kThreads, 0, cuda_stream>>>(args);
  } else {
    pack_indices_kernel<int32_t><<<grid_size(total, kThreads), kThreads, 0, cuda_stream>>>(args);
  }
  check_launch("pack_indices_kernel");
}

void launch_count_rows(const CountRowsArgs& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  // cudaMemsetAsync can be captured in a graph.
  if (args.experts > 0) cudaMemsetAsync(args.counts, 0, sizeof(int32_t) * args.experts, cuda_stream);
  if (args.numel > 0) {
    count_experts_kernel<<<grid_size(args.numel, kThreads), kThreads, 0, cuda_stream>>>(args);
    check_launch("count_experts_kernel");
  }
  require_rows_kernel<<<1, kThreads, 0, cuda_stream>>>(args);
  check_launch("require_rows_kernel");
}

}  // namespace transformer_plugin::expert_parallel
