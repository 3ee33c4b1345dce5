// The launch of combine for one dtype (combine_kernel.cuh).
#pragma once

#include "common/shared_memory.cuh"
#include "expert_parallel/one_sided/combine_kernel.cuh"
#include "expert_parallel/one_sided/combine_of.h"
#include "expert_parallel/one_sided/launch.cuh"

namespace transformer_plugin::expert_parallel::one_sided {

template <typename T>
void launch_combine_of(const CombineArgs& args, int steps, void* stream) {
  // The slots of one row for each warp; more than kernels have unless they ask for it.
  constexpr int kMostShared = kWarps * static_cast<int>(routing::kMaxTopk * sizeof(int32_t));
  constexpr size_t kAlwaysThere = 32 * 1024;
  const Exchange& exchange = args.exchange;
  const int64_t row_bytes = args.width * static_cast<int64_t>(sizeof(T));
  check_exchange(exchange,
                 record_stride(row_bytes, args.weights_width * static_cast<int64_t>(sizeof(Sum<T>))));
  if (args.slot && args.topk > routing::kMaxTopk)
    throw std::invalid_argument("transformer_plugin: combine takes at most 1024 slots of a row");
  const size_t shared = args.slot ? kWarps * sizeof(int32_t) * static_cast<size_t>(args.topk) : 0;
  if (shared > kAlwaysThere) {
    static DynamicSharedMemory allowed;
    allowed.allow(combine_kernel<T>, kMostShared);
  }
  const int64_t rows = exchange.layout.rows + args.tokens;
  const unsigned blocks =
      grid_of(exchange, ceil_div(rows, int64_t{exchange.chunk_rows}) + 2 * int64_t{exchange.peers.ranks});
  combine_kernel<T><<<blocks, kThreads, shared, static_cast<cudaStream_t>(stream)>>>(args, steps);
  check_launch("combine_kernel");
}

}  // namespace transformer_plugin::expert_parallel::one_sided
