// What the launches of dispatch and combine share: the size of the grid, and checks of the channel.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "expert_parallel/one_sided/exchange.cuh"

namespace transformer_plugin::expert_parallel::one_sided {

// All blocks are resident at once on an idle GPU. `units`: of the larger half, at most.
inline unsigned grid_of(const Exchange& exchange, int64_t units) {
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (exchange.max_sms > 0) multiprocessors = std::min(multiprocessors, static_cast<int>(exchange.max_sms));
  const int64_t most = int64_t{kBlocksPerSm} * std::max(1, multiprocessors);
  return static_cast<unsigned>(std::clamp<int64_t>(units, 1, most));
}

inline void check_exchange(const Exchange& exchange, int64_t stride) {
  if (exchange.peers.ranks < 1 || exchange.peers.ranks > kMostPeers || exchange.peers.rank < 0 ||
      exchange.peers.rank >= exchange.peers.ranks || exchange.destinations > kMostPeers)
    throw std::invalid_argument("transformer_plugin: a one-sided exchange has from 1 to 72 ranks");
  if (exchange.chunk_rows < 1 || kMostChunkRows % exchange.chunk_rows != 0)
    throw std::invalid_argument(
        "transformer_plugin: a chunk of a one-sided exchange has 1, 2, 4, 8 or 16 rows");
  if (stride > exchange.layout.record_bytes)
    throw std::invalid_argument(
        "transformer_plugin: a record is larger than the channel of the exchange allows");
}

}  // namespace transformer_plugin::expert_parallel::one_sided
