// What the ops for tests share in which R ranks are tensors of one process on one GPU.
//
// channel [R * bytes] uint8 is the symmetric memory of all ranks; virtual_channel_layout and virtual_plan_layout say how many bytes,
// and where the parts of a rank's memory are. The state [R, 16] int32 is the LocalState or PlanState of each rank. Both stay as
// they are from one exchange or plan to the next.
#pragma once

#include <ATen/core/Tensor.h>

#include "common/check.h"
#include "expert_parallel/one_sided/args.h"

namespace transformer_plugin::expert_parallel::one_sided {

inline constexpr int64_t kStateWords = 16;

inline PeerPointers peers_of(const at::Tensor& channel, int64_t rank, int64_t ranks, int64_t bytes) {
  PeerPointers peers{};
  peers.rank = static_cast<int32_t>(rank);
  peers.ranks = static_cast<int32_t>(ranks);
  for (int64_t r = 0; r < ranks; ++r) peers.memory[r] = channel.mutable_data_ptr<uint8_t>() + r * bytes;
  return peers;
}

inline void check_on_cuda(const char* op, const at::Tensor& channel) {
  TORCH_CHECK_NOT_IMPLEMENTED(channel.is_cuda(),
                              TP_FOUR_PARTS(op, "channel", "a tensor on CUDA", describe(channel),
                                            "The one-sided exchange is for GPUs"));
}

}  // namespace transformer_plugin::expert_parallel::one_sided
