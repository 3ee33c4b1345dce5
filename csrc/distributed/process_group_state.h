// The state that this process keeps for each group it has used, and the waits on other ranks, all bounded in
// time.
//
// On a CPU the calling thread waits and raises an error. On CUDA the host does not wait: the watchdog thread
// observes how far each group's stream has come (progress.h). If a collective does not end within the
// timeout, the watchdog finds the missing ranks, prints the error and ends the process, because a stream that
// waits for a lost rank cannot be recovered.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <typeindex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "distributed/call.h"
#include "distributed/liveness.h"
#include "distributed/progress.h"

namespace transformer_plugin::distributed {

// One c10d group, from its first use in this process until the group object is destroyed. A group that is
// created again under the same name has a new state.
struct ProcessGroupState {
  ProcessGroupState(std::string name, const c10::intrusive_ptr<c10d::ProcessGroup>& group);
  // Whether this is the state of that very group object.
  bool is_of(const c10::intrusive_ptr<c10d::ProcessGroup>& other) const;
  bool expired() const;
  // Prefix of this group's keys in its store, which may still hold the keys of an earlier group of this name.
  const std::string& key_prefix();
  Heartbeat heartbeat(const char* kind);

  const std::string name;
  const int64_t rank;
  const int64_t size;
  const c10::weak_intrusive_ptr<c10d::ProcessGroup> group;  // weak: the state does not keep the group alive
  // Only compared. No other object has this address while the weak reference exists.
  const c10d::ProcessGroup* const address;
  const std::shared_ptr<StoreClient> store;
  const std::shared_ptr<std::atomic<int64_t>> heartbeat_count = std::make_shared<std::atomic<int64_t>>(0);
  std::once_flag key_prefix_once;
  std::string made_key_prefix;

  std::mutex failure_mutex;               // guards `failure`
  std::optional<LivenessReport> failure;  // set: the group is not used again

  // CPU: one call at a time, and its collectives are waited for one at a time.
  std::mutex call_mutex;
  c10::intrusive_ptr<c10d::Backend> cpu_backend;
  std::atomic<int64_t> cpu_sequence{0};
  int64_t call_count = 0;  // the last call's number, as fields of kind kPerCall have it

  // What a family of ops keeps for the group: one object of each type, made from `arguments` at its first use. This folder does
  // not know the types.
  template <typename T, typename... Arguments>
  T& extension(Arguments&&... arguments) {
    const std::lock_guard<std::recursive_mutex> lock(extensions_mutex);
    std::shared_ptr<void>& object = extensions[typeid(T)];
    if (!object) object = std::make_shared<T>(std::forward<Arguments>(arguments)...);
    return *static_cast<T*>(object.get());
  }
  std::recursive_mutex extensions_mutex;  // recursive: a constructor may use another extension
  std::unordered_map<std::type_index, std::shared_ptr<void>> extensions;

  // Exchanges through the store.
  std::atomic<int64_t> text_sequence{0};
  std::mutex signature_mutex;
  std::set<std::vector<int64_t>> signatures;  // kinds of calls that all ranks have been found to make alike
  std::atomic<int64_t> signature_sequence{0};

  // CUDA. The progress page is allocated at the first use on a device; the watchdog reads the rest. Times are
  // in ms of the steady clock.
  std::once_flag progress_once;
  StreamProgress progress{};
  std::atomic<ProgressPage*> page{nullptr};
  std::atomic<int64_t> timeout_ms{0};
  std::atomic<int64_t> first_call_end_ms{0};  // when the first call returned; 0: it has not
  std::atomic<int64_t> host_sequence{0};      // number of collectives passed to NCCL
  std::atomic<int64_t> host_begin_ms{0};      // when the host entered NCCL; 0: it is not in NCCL
  std::atomic<int32_t> host_phase_id{0};
  std::atomic<int32_t> host_label{0};

  // What collectives are about, for the watchdog: texts by their numbers from 1, which kernels write to the page.
  int32_t number_of_label(const std::string& text);
  std::string label(int32_t number);
  std::mutex subjects_mutex;
  std::unordered_map<std::string, int32_t> label_numbers;
  std::vector<std::string> labels;
};

// The state of `group`, created on first use. Null group: the group of this process alone.
std::shared_ptr<ProcessGroupState> process_group_state(const std::string& name,
                                                       const c10::intrusive_ptr<c10d::ProcessGroup>& group);
// Releases the states of groups that have been destroyed.
void release_expired_groups();

// Runs the liveness check and raises the error. The group is not used again. `waits_for`: the text that this
// rank's heartbeats contain; empty: the phase.
[[noreturn]] void raise_peer_error(ProcessGroupState& state, Heartbeat heartbeat, int64_t sequence,
                                   const Phase& phase, Milliseconds timeout, const std::string& backend_error,
                                   const std::string& waits_for = "");
// Raises the error again if an earlier call has failed.
void check_not_failed(ProcessGroupState& state, const Phase& phase, Milliseconds timeout);
// Every rank's text in ascending order of ranks, through the group's store. `kind` names a sequence of
// exchanges, and `sequence` is the number of this one in it.
std::vector<std::string> all_gather_texts(ProcessGroupState& state, const char* kind, int64_t sequence,
                                          const std::string& text, const Phase& phase,
                                          const std::string& waits_for, Milliseconds timeout);
// Compares a kind of call that is new on this rank with the other ranks' calls, through the store. Raises
// ValueError where they differ.
void compare_signature(ProcessGroupState& state, const Call& call, Milliseconds timeout);

#ifdef TRANSFORMER_PLUGIN_CUDA
// The group's progress page, allocated on the current device.
const StreamProgress& group_progress(ProcessGroupState& state);
// Adds the group to those that the watchdog thread observes.
void watch_group(const std::shared_ptr<ProcessGroupState>& state);
#endif

// The least timeout of the first call on a group: NCCL creates its communicator in it.
inline constexpr int64_t kFirstCallMs = 30000;

// The first line of an exception's text, without a stack trace.
std::string first_line(const std::exception& error);

}  // namespace transformer_plugin::distributed
