// The groups that this process has used, and the bounded waits in them.
//
// On a CPU the calling thread waits, and raises. On CUDA nobody waits: a thread of the process watches how
// far each group's stream has come (watch_args.h), and when a collective does not end within the timeout it
// holds the inquest, prints the error and ends the process, because a stream that waits for a lost peer
// cannot be brought back.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "expert_parallel/peers.h"
#include "expert_parallel/watch_args.h"

namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d

namespace transformer_plugin::expert_parallel {

// One group in this process, from its first collective until release_group.
struct GroupState {
  std::string name;
  int64_t rank = 0;
  int64_t size = 1;
  std::string keys;                           // prefix of this group's keys in the store
  const c10d::ProcessGroup* group = nullptr;  // only compared
  std::shared_ptr<StoreLine> line;

  // CPU: collectives are waited for one at a time.
  std::atomic<int64_t> cpu_turn{0};
  std::atomic<int64_t> agreements{0};

  // CUDA. The board is made at the first use on a device; the watch thread reads the rest.
  std::once_flag board_made;
  BoardMemory memory{};
  std::atomic<Board*> board{nullptr};
  std::atomic<int64_t> timeout_ms{0};
  std::atomic<int64_t> settled{0};     // when the first call returned, in ms of the steady clock; 0: not yet
  std::atomic<int64_t> host_turn{0};   // collectives handed to NCCL
  std::atomic<int64_t> host_since{0};  // when the one under way was, in ms of the steady clock; 0: none is
  std::atomic<int32_t> host_phase{0};
};

// The state of `group`, made on first sight. Null group: the group of this process alone.
std::shared_ptr<GroupState> group_state(const std::string& name, const c10d::ProcessGroup* group,
                                        int64_t rank, int64_t size);
// Before a group is destroyed, so that one made later under its name is not taken for it.
void forget_group(const std::string& name);

// Waits for a collective on the CPU. A peer that does not come within `timeout`, or is lost, is an error that
// peer_error words.
void wait_on_cpu(GroupState& state, c10d::Work& work, Phase phase, Milliseconds timeout);
// Raises it, for a failure of the transport.
[[noreturn]] void raise_peer_error(GroupState& state, Roll& roll, int64_t turn, Phase phase,
                                   Milliseconds timeout, const std::string& cause);

#ifdef TRANSFORMER_PLUGIN_CUDA
// The board of the group, on the current device.
const BoardMemory& group_board(GroupState& state);
// From now on the watch thread looks after this group.
void watch_group(const std::shared_ptr<GroupState>& state);
#endif

// What the first call on a group may take at least: NCCL makes its communicator in it.
inline constexpr int64_t kFirstCallMs = 30000;

int64_t steady_ms();
// The first line of an exception's text, without a stack trace.
std::string cause_of(const std::exception& error);

}  // namespace transformer_plugin::expert_parallel
