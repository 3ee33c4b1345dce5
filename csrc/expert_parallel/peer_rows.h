// The rows of `peer_rows`, int32 [4, R + 1], of a plan by records (record_plan.h), without torch.
#pragma once

#include <cstdint>

namespace transformer_plugin::expert_parallel {

enum PeerRows : int32_t {
  kReceived = 0,  // from rank r come the received rows [r], ..., [r + 1] - 1
  kSent = 1,      // the records [r], ..., [r + 1] - 1 go to rank r; within a rank in the order of tokens
  kPut = 2,       // record kSent[r] is row [r] of those that rank r receives from other ranks; 0 of this rank
  kReturned = 3,  // received row kReceived[r] is record [r] of those of rank r to other ranks; 0 of this rank
};

}  // namespace transformer_plugin::expert_parallel
