// The states of the process's groups.
#include "distributed/process_group_state.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

namespace transformer_plugin::distributed {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<ProcessGroupState>> groups;
};

void close_cpu_backends();

// One for each process: a forked child starts with an empty one, because threads of the parent may have held
// its locks.
Registry& registry() {
  static std::atomic<Registry*> current{nullptr};
  static std::atomic<pid_t> owner{0};
  static std::mutex creation_mutex;
  if (owner.load(std::memory_order_acquire) != getpid()) {
    const std::lock_guard<std::mutex> lock(creation_mutex);
    if (owner.load() != getpid()) {
      current.store(new Registry);  // never freed: threads may use it until the process ends
      std::atexit(close_cpu_backends);
      owner.store(getpid(), std::memory_order_release);
    }
  }
  return *current.load(std::memory_order_acquire);
}

// At exit: joins the threads of the CPU backends before the objects that they use are destroyed.
void close_cpu_backends() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (auto& [name, state] : all.groups) {
    const std::unique_lock<std::mutex> idle(state->call_mutex, std::try_to_lock);
    if (idle) state->cpu_backend.reset();
  }
}

}  // namespace

ProcessGroupState::ProcessGroupState(std::string name, const c10::intrusive_ptr<c10d::ProcessGroup>& group)
    : name(std::move(name)),
      rank(group ? group->getRank() : 0),
      size(group ? group->getSize() : 1),
      group(group),
      address(group.get()),
      store(std::make_shared<StoreClient>(group ? group->getStore() : nullptr)) {}

bool ProcessGroupState::is_of(const c10::intrusive_ptr<c10d::ProcessGroup>& other) const {
  return address == other.get() && (!address || !group.expired()) && (!other || other->getRank() == rank) &&
         (!other || other->getSize() == size);
}

bool ProcessGroupState::expired() const { return address && group.expired(); }

const std::string& ProcessGroupState::key_prefix() {
  std::call_once(key_prefix_once, [this] {
    // Counts the groups of this size that this rank has had in the store: all ranks of the group count the
    // same.
    const std::string base = "transformer_plugin/" + std::to_string(size) + "/";
    const auto count = std::make_shared<std::atomic<int64_t>>(0);
    store->request(kStoreConnectLimit, [key = base + "rank/" + std::to_string(rank),
                                        count](c10d::Store& store) { *count = store.add(key, 1); });
    made_key_prefix = base + std::to_string(count->load()) + "/";
  });
  return made_key_prefix;
}

Heartbeat ProcessGroupState::heartbeat(const char* kind) {
  return Heartbeat(store, key_prefix(), kind, rank, size, heartbeat_count);
}

std::shared_ptr<ProcessGroupState> process_group_state(const std::string& name,
                                                       const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  release_expired_groups();
  Registry& all = registry();
  std::shared_ptr<ProcessGroupState> old;  // destroyed after the lock is released
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::shared_ptr<ProcessGroupState>& entry = all.groups[name];
  if (entry && entry->is_of(group)) return entry;
  old = std::exchange(entry, std::make_shared<ProcessGroupState>(name, group));
  return entry;
}

void release_expired_groups() {
  Registry& all = registry();
  // Destroyed after the lock is released, because that joins threads.
  std::vector<std::shared_ptr<ProcessGroupState>> old;
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (auto each = all.groups.begin(); each != all.groups.end();) {
    if (!each->second->expired()) {
      ++each;
      continue;
    }
    old.push_back(std::move(each->second));
    each = all.groups.erase(each);
  }
}

std::string first_line(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  std::string text = torch_error ? torch_error->what_without_backtrace() : error.what();
  text = text.substr(0, text.find('\n'));
  return text.substr(0, 300);
}

void raise_peer_error(ProcessGroupState& state, Heartbeat heartbeat, int64_t sequence, const Phase& phase,
                      Milliseconds timeout, const std::string& backend_error, const std::string& waits_for) {
  LivenessReport report =
      heartbeat.find_missing_ranks(sequence, waits_for.empty() ? phase_text(phase) : waits_for);
  {
    const std::lock_guard<std::mutex> lock(state.failure_mutex);
    if (state.failure) {
      report = *state.failure;
    } else {
      state.failure = report;
    }
  }
  C10_THROW_ERROR(DistBackendError,
                  peer_error(phase, state.name, state.rank, state.size, timeout, report, backend_error));
}

void check_not_failed(ProcessGroupState& state, const Phase& phase, Milliseconds timeout) {
  const std::lock_guard<std::mutex> lock(state.failure_mutex);
  if (!state.failure) return;
  C10_THROW_ERROR(DistBackendError, peer_error(phase, state.name, state.rank, state.size, timeout,
                                               *state.failure, "an earlier call on this group failed"));
}

int32_t ProcessGroupState::number_of_label(const std::string& text) {
  if (text.empty()) return 0;
  const std::lock_guard<std::mutex> lock(subjects_mutex);
  const auto [place, is_new] = label_numbers.try_emplace(text, static_cast<int32_t>(labels.size()) + 1);
  if (is_new) labels.push_back(text);
  return place->second;
}

std::string ProcessGroupState::label(int32_t number) {
  const std::lock_guard<std::mutex> lock(subjects_mutex);
  const auto place = static_cast<size_t>(number) - 1;
  return number > 0 && place < labels.size() ? labels[place] : std::string();
}

}  // namespace transformer_plugin::distributed
