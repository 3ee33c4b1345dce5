// Memory that every rank of a group reads and writes by pointers.
//
// Each rank has one piece of equal size on its own GPU, and each process sees the pieces of all ranks. Who writes what and when is
// agreed by the users of the memory: nothing here orders one rank's accesses with those of another.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>

#include "distributed/process_group_state.h"

namespace transformer_plugin::distributed {

class PeerMemory {
 public:
  // Frees what this process holds. It waits for no rank, and neither hangs nor ends the process when a peer is gone.
  virtual ~PeerMemory() = default;
  virtual int64_t rank() const = 0;
  virtual int64_t ranks() const = 0;
  // Of each rank's piece.
  virtual int64_t bytes() const = 0;
  // Address of `rank`'s piece in this process.
  virtual void* pointer(int64_t rank) const = 0;
};

// A CUDA device without a number is the current one.
at::Device with_index(at::Device device);

// Allocates `bytes` bytes on `device`, which every rank of the group calls with its own device. Every piece is zero before any rank
// returns. Null on every rank, with the same `reason`, if a rank could not: the reason names ranks. A rank that does not come is
// a PeerTimeoutError. The group keeps the memory as long as its state lives, because CUDA graphs may hold the addresses.
std::shared_ptr<PeerMemory> allocate_peer_memory(ProcessGroupState& state, const at::Device& device,
                                                 int64_t bytes, Milliseconds timeout, std::string* reason);

// Waits until every rank of the group has come here. Returns what they report, which is the same text on all of them: "" if every
// `report` is empty. A rank that does not come is a PeerTimeoutError.
std::string agree_on_peer_memory(ProcessGroupState& state, const std::string& report, Milliseconds timeout);

}  // namespace transformer_plugin::distributed
