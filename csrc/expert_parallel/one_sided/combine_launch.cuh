// The launch of combine for one dtype (combine_kernel.cuh).
#pragma once

#include "common/shared_memory.cuh"
#include "expert_parallel/one_sided/combine_kernel.cuh"
#include "expert_parallel/one_sided/combine_of.h"
#include "expert_parallel/one_sided/launch.cuh"

namespace transformer_plugin::expert_parallel::one_sided {

// The list of a warp: the slots of one row, and the records of a token.
inline int64_t list_entries(const CombineArgs& args) {
  return (args.slot ? args.topk : 1) + args.exchange.destinations;
}

// Whether rows are whole, aligned words of 16 bytes.
template <typename T>
bool has_words(const CombineArgs& args) {
  const uint64_t addresses = reinterpret_cast<uint64_t>(args.rows) | reinterpret_cast<uint64_t>(args.output);
  return args.width % kVectorSize<T> == 0 && addresses % sizeof(uint4) == 0;
}

template <typename T, int N>
void launch_combine_with(const CombineArgs& args, int steps, unsigned blocks, void* stream) {
  constexpr size_t kMostShared = kWarps * (routing::kMaxTopk + kMostPeers) * sizeof(int32_t);
  constexpr size_t kAlwaysThere = 32 * 1024;  // more than that kernels have only if they ask for it
  const size_t shared = kWarps * sizeof(int32_t) * static_cast<size_t>(list_entries(args));
  if (shared > kAlwaysThere) {
    static DynamicSharedMemory allowed;
    allowed.allow(combine_kernel<T, N>, static_cast<int>(kMostShared));
  }
  combine_kernel<T, N><<<blocks, kThreads, shared, static_cast<cudaStream_t>(stream)>>>(args, steps);
  check_launch("combine_kernel");
}

template <typename T>
void launch_combine_of(const CombineArgs& args, int steps, void* stream) {
  const Exchange& exchange = args.exchange;
  const int64_t row_bytes = args.width * static_cast<int64_t>(sizeof(T));
  check_exchange(exchange,
                 record_stride(row_bytes, args.weights_width * static_cast<int64_t>(sizeof(Sum<T>))));
  if (args.slot && args.topk > routing::kMaxTopk)
    throw std::invalid_argument("transformer_plugin: combine takes at most 1024 slots of a row");
  const int64_t rows = exchange.layout.rows + args.tokens;
  const unsigned blocks =
      grid_of(exchange, ceil_div(rows, int64_t{exchange.chunk_rows}) + 2 * int64_t{exchange.peers.ranks});
  if (has_words<T>(args)) return launch_combine_with<T, kVectorSize<T>>(args, steps, blocks, stream);
  launch_combine_with<T, 1>(args, steps, blocks, stream);
}

}  // namespace transformer_plugin::expert_parallel::one_sided
