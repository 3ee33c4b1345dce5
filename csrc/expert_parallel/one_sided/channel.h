// A channel: the memory of all ranks through which a group exchanges rows one-sidedly. Contexts open it, collectively, before the
// first exchange. All layers of a group use its channel 0, one exchange after the other; what is to be in flight at the same
// time uses channels with other numbers.
#pragma once

#ifdef TRANSFORMER_PLUGIN_CUDA
#include <ATen/core/Tensor.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "distributed/side_stream.h"
#include "distributed/symmetric/peer_memory.h"
#include "expert_parallel/group.h"
#include "expert_parallel/one_sided/args.h"
#include "expert_parallel/one_sided/plan_args.h"

namespace transformer_plugin::expert_parallel::one_sided {

// The most that one exchange, and one plan, may need; the same on every rank.
struct ChannelSizes {
  int64_t received_rows;  // that a rank gets from others in a dispatch
  int64_t returned_rows;  // that a rank gets back from others in a combine
  int64_t record_bytes;   // record_stride() of a row and its weights
  int64_t experts;
  int64_t planned_rows;  // N of a plan
  int64_t topk;

  bool cover(const ChannelSizes& other) const;
  ChannelSizes with(const ChannelSizes& other) const;
};

// Where the last call of a channel is.
struct ChannelOrder {
  std::mutex mutex;  // held while a call is enqueued
  distributed::SideStream streams;
  std::optional<distributed::StreamEvent> end;
  distributed::StreamContext context;  // of it
};

// What a channel has in memory of this rank alone.
struct OwnState {
  at::Tensor states;  // of exchanges, then of plans
  ChannelFailure* failure;
};

class Channel {
 public:
  // `replaced`: the channel of this number before, or null.
  Channel(const ChannelSizes& sizes, std::shared_ptr<distributed::PeerMemory> memory, OwnState own,
          std::shared_ptr<const Channel> replaced);

  // Bytes of each rank's memory.
  static int64_t bytes(const ChannelSizes& sizes, int64_t ranks);

  const ChannelSizes& sizes() const { return sizes_; }
  const ChannelLayout& layout() const { return layout_; }
  const PlanLayout& plan_layout() const { return plan_layout_; }
  PeerPointers peers() const;
  LocalState* state() const;
  PlanState* plan_state() const;
  ChannelFailure* failure() const { return own_.failure; }
  // Of all channels of this number: they take turns with those that they replaced.
  ChannelOrder& order() const { return *order_; }
  // It stays as it was, because CUDA graphs hold its addresses.
  const std::shared_ptr<const Channel>& replaced() const { return replaced_; }

 private:
  const ChannelSizes sizes_;
  const ChannelLayout layout_;
  const PlanLayout plan_layout_;
  const std::shared_ptr<distributed::PeerMemory> memory_;
  const OwnState own_;
  const std::shared_ptr<const Channel> replaced_;
  const std::shared_ptr<ChannelOrder> order_;
};

// A call's turn, from the construction to the destruction. Calls of a channel run one after the other in the order in which the host
// makes them, whatever their streams: the current stream waits for the end of the call before. What replayed graphs hold is not
// ordered here.
class ChannelTurn {
 public:
  ChannelTurn(const Channel& channel, c10::Device device);
  ~ChannelTurn();
  ChannelTurn(const ChannelTurn&) = delete;
  ChannelTurn& operator=(const ChannelTurn&) = delete;

 private:
  ChannelOrder& order_;
  const std::lock_guard<std::mutex> lock_;
  const c10::Device device_;
  const distributed::StreamContext here_;
};

// The open channel of the number in the group's name. An error if it is not open, or if an earlier call of it, or of one that it
// replaced, failed on the GPU.
std::shared_ptr<const Channel> channel_of(const char* op, const ExpertParallelGroup& group);

// Opens a channel that is also large enough for these sizes, in place of the open one. Collective, in a call that all ranks make.
std::shared_ptr<const Channel> enlarge_channel(const char* op, const ExpertParallelGroup& group,
                                               const ChannelSizes& sizes, const at::Device& device);

// How long a kernel waits for another rank. The watchdog ends the process after the timeout of the call; kernels wait longer, so
// that it finds the missing ranks first.
int64_t kernel_timeout_ns(const ExpertParallelGroup& group);

}  // namespace transformer_plugin::expert_parallel::one_sided
#endif
