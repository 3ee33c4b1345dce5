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
#include <optional>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "distributed/call.h"
#include "distributed/liveness.h"
#include "distributed/progress.h"

namespace transformer_plugin::expert_parallel {

// A plan that this process made in a group, by its tensor `slot`, so that a call is known to use it.
struct KnownPlan {
  c10::weak_intrusive_ptr<c10::StorageImpl> slot;
  int64_t call;    // which call of the group made it
  int64_t tokens;  // of this rank
};

// One group in this process, from its first use until the group itself is gone. Made anew under its name, also with
// other ranks, it is another one.
struct GroupState {
  GroupState(std::string name, const c10::intrusive_ptr<c10d::ProcessGroup>& group);
  // Whether this is that very group. Weak: nothing here keeps a group alive.
  bool is(const c10::intrusive_ptr<c10d::ProcessGroup>& other) const;
  bool gone() const;
  // Prefix of this group's keys in its store, which may hold those of an earlier group of the same name.
  const std::string& keys();
  Roll roll(const char* kind);

  const std::string name;
  const int64_t rank;
  const int64_t size;
  const c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  const c10d::ProcessGroup* const
      address;  // only compared; not given to another while the weak reference is here
  const std::shared_ptr<StoreLine> line;
  const std::shared_ptr<std::atomic<int64_t>> beats = std::make_shared<std::atomic<int64_t>>(0);
  std::once_flag keys_made;
  std::string made_keys;

  std::mutex failing;             // guards what follows
  std::optional<Verdict> failed;  // after it the group is not used again

  // CPU: one call at a time, and in it collectives are waited for one at a time.
  std::mutex calling;
  c10::intrusive_ptr<c10d::Backend> transport;
  std::atomic<int64_t> cpu_turn{0};
  int64_t calls = 0;
  std::vector<KnownPlan> plans;

  // Through the store.
  std::atomic<int64_t> agreements{0};
  std::mutex comparing;
  std::set<std::vector<int64_t>> signatures;  // kinds of calls that all ranks were found to make alike
  std::atomic<int64_t> comparisons{0};

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
std::shared_ptr<GroupState> group_state(const std::string& name,
                                        const c10::intrusive_ptr<c10d::ProcessGroup>& group);
// Lets go of what is kept for groups that are gone.
void forget_groups();

// Waits for a collective on the CPU. A peer that does not come within `timeout`, or is lost, is an error that
// peer_error words.
void wait_on_cpu(GroupState& state, const c10::intrusive_ptr<c10d::Work>& work, Phase phase,
                 Milliseconds timeout);
// Raises it, for a failure of the transport. The group is not used again.
[[noreturn]] void raise_peer_error(GroupState& state, Roll roll, int64_t turn, Phase phase,
                                   Milliseconds timeout, const std::string& cause,
                                   const std::string& place = "");
// Raises where an earlier call has failed.
void refuse_failed(GroupState& state, Phase phase, Milliseconds timeout);
// Every rank's text, by ascending rank, through the group's store: the `turn`-th exchange of this kind.
std::vector<std::string> exchange_texts(GroupState& state, const char* kind, int64_t turn,
                                        const std::string& text, Phase phase, const std::string& place,
                                        Milliseconds timeout);
// Compares a kind of call that this rank has not made before with what the others announce. ValueError where they
// differ.
void compare_signature(GroupState& state, const Call& call, Milliseconds timeout);

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
