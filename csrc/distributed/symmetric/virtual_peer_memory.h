// Peer memory of ranks that one process plays, for tests of code that moves data between ranks with fewer GPUs than ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <utility>
#include <vector>

#include "distributed/symmetric/peer_memory.h"

namespace transformer_plugin::distributed {

// The view of one of these ranks. The pieces lie one behind the other in one tensor.
class VirtualPeerMemory : public PeerMemory {
 public:
  VirtualPeerMemory(at::Tensor memory, int64_t rank, int64_t ranks)
      : memory_(std::move(memory)), rank_(rank), ranks_(ranks) {}

  int64_t rank() const override { return rank_; }
  int64_t ranks() const override { return ranks_; }
  int64_t bytes() const override { return memory_.numel() / ranks_; }
  void* pointer(int64_t rank) const override {
    return static_cast<uint8_t*>(memory_.mutable_data_ptr()) + rank * bytes();
  }

 private:
  const at::Tensor memory_;  // uint8, the bytes of all ranks
  const int64_t rank_;
  const int64_t ranks_;
};

// One for each rank, over `bytes` zero bytes a rank on `device`.
inline std::vector<std::shared_ptr<PeerMemory>> virtual_peer_memory(const at::Device& device, int64_t ranks,
                                                                    int64_t bytes) {
  const at::Tensor memory = at::zeros({ranks * bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  std::vector<std::shared_ptr<PeerMemory>> views;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    views.push_back(std::make_shared<VirtualPeerMemory>(memory, rank, ranks));
  }
  return views;
}

}  // namespace transformer_plugin::distributed
