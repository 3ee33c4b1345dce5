// Symmetric memory for tensors of the caller: allocations of a group, made collectively, from which each rank takes tensors by
// itself. Where such a tensor lies is known from its storage, so that it can be announced to other ranks, which write into it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "distributed/symmetric/allocation_table.h"
#include "distributed/symmetric/peer_memory.h"

namespace transformer_plugin::distributed {

// One allocation, and which parts of it are in use.
class SymmetricAllocation {
 public:
  SymmetricAllocation(int64_t number, std::shared_ptr<PeerMemory> memory, const at::Device& device)
      : number_(number), memory_(std::move(memory)), device_(device) {}

  int64_t number() const { return number_; }
  const at::Device& device() const { return device_; }
  int64_t bytes() const { return memory_->bytes(); }
  char* begin() const { return static_cast<char*>(memory_->pointer(memory_->rank())); }

  // The first free place of so many bytes, or none; release() gives it back.
  std::optional<int64_t> take(int64_t bytes);
  void release(int64_t place);
  int64_t largest_free() const;

 private:
  const int64_t number_;
  const std::shared_ptr<PeerMemory> memory_;
  const at::Device device_;
  mutable std::mutex mutex_;
  std::map<int64_t, int64_t> used_;  // place -> end
};

// Of one group. The memory stays until the group is destroyed, because CUDA graphs may hold its addresses.
class SymmetricAllocations {
 public:
  // Numbers from 1 on, alike on all ranks, because allocations are collective.
  int64_t add(std::shared_ptr<PeerMemory> memory, const at::Device& device);
  std::shared_ptr<SymmetricAllocation> find(int64_t number) const;
  // On the device (allocation_table.h); null before the first.
  void* const* addresses() const { return addresses_; }

 private:
  // Puts the addresses of all ranks into the table.
  void enter(int64_t number, const PeerMemory& memory, const at::Device& device);

  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<SymmetricAllocation>> allocations_;
  at::Tensor table_;
  void* const* addresses_ = nullptr;
};

// Where the first element of a tensor is in symmetric memory.
struct SymmetricPlace {
  const SymmetricAllocation* allocation;
  int64_t offset;  // in bytes
};

// Of a tensor, or a view of one, that symmetric_empty has returned.
std::optional<SymmetricPlace> symmetric_place(const at::Tensor& tensor);

}  // namespace transformer_plugin::distributed
