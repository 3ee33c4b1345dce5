#include "distributed/group_state.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

namespace transformer_plugin::expert_parallel {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<GroupState>> groups;
};

void close_transports();

// Of this process: a forked child starts with an empty one, whatever locks the parent's threads held.
Registry& registry() {
  static std::atomic<Registry*> current{nullptr};
  static std::atomic<pid_t> owner{0};
  static std::mutex making;
  if (owner.load(std::memory_order_acquire) != getpid()) {
    const std::lock_guard<std::mutex> lock(making);
    if (owner.load() != getpid()) {
      current.store(new Registry);  // never freed: threads may use it until the process is gone
      std::atexit(close_transports);
      owner.store(getpid(), std::memory_order_release);
    }
  }
  return *current.load(std::memory_order_acquire);
}

// At the end of the process: the threads of the transports are joined before what they use is destroyed.
void close_transports() {
  Registry& groups = registry();
  const std::lock_guard<std::mutex> lock(groups.mutex);
  for (auto& [name, state] : groups.groups) {
    const std::unique_lock<std::mutex> idle(state->calling, std::try_to_lock);
    if (idle) state->transport.reset();
  }
}

}  // namespace

GroupState::GroupState(std::string name, const c10::intrusive_ptr<c10d::ProcessGroup>& group)
    : name(std::move(name)),
      rank(group ? group->getRank() : 0),
      size(group ? group->getSize() : 1),
      group(group),
      address(group.get()),
      line(std::make_shared<StoreLine>(group ? group->getStore() : nullptr)) {}

bool GroupState::is(const c10::intrusive_ptr<c10d::ProcessGroup>& other) const {
  return address == other.get() && (!address || !group.expired()) && (!other || other->getRank() == rank) &&
         (!other || other->getSize() == size);
}

bool GroupState::gone() const { return address && group.expired(); }

const std::string& GroupState::keys() {
  std::call_once(keys_made, [this] {
    // How many groups of this name and size the store has seen at this rank: the same number at each of its ranks.
    const std::string base = "transformer_plugin/" + std::to_string(size) + "/";
    const auto count = std::make_shared<std::atomic<int64_t>>(0);
    line->ask(kConnect, [key = base + "rank/" + std::to_string(rank), count](c10d::Store& store) {
      *count = store.add(key, 1);
    });
    made_keys = base + std::to_string(count->load()) + "/";
  });
  return made_keys;
}

Roll GroupState::roll(const char* kind) { return Roll(line, keys(), kind, rank, size, beats); }

std::shared_ptr<GroupState> group_state(const std::string& name,
                                        const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  forget_groups();
  Registry& groups = registry();
  std::shared_ptr<GroupState> old;  // let go of after the lock
  const std::lock_guard<std::mutex> lock(groups.mutex);
  std::shared_ptr<GroupState>& entry = groups.groups[name];
  if (entry && entry->is(group)) return entry;
  old = std::exchange(entry, std::make_shared<GroupState>(name, group));
  return entry;
}

void forget_groups() {
  Registry& groups = registry();
  std::vector<std::shared_ptr<GroupState>> old;  // let go of after the lock: threads are joined
  const std::lock_guard<std::mutex> lock(groups.mutex);
  for (auto each = groups.groups.begin(); each != groups.groups.end();) {
    if (!each->second->gone()) {
      ++each;
      continue;
    }
    old.push_back(std::move(each->second));
    each = groups.groups.erase(each);
  }
}

int64_t steady_ms() {
  return std::chrono::duration_cast<Milliseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::string cause_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  std::string text = torch_error ? torch_error->what_without_backtrace() : error.what();
  text = text.substr(0, text.find('\n'));
  return text.substr(0, 300);
}

void raise_peer_error(GroupState& state, Roll roll, int64_t turn, Phase phase, Milliseconds timeout,
                      const std::string& cause, const std::string& place) {
  Verdict verdict = roll.inquest(turn, place.empty() ? place_of(phase) : place);
  {
    const std::lock_guard<std::mutex> lock(state.failing);
    if (state.failed) {
      verdict = *state.failed;
    } else {
      state.failed = verdict;
    }
  }
  C10_THROW_ERROR(DistBackendError,
                  peer_error(phase, state.name, state.rank, state.size, timeout, verdict, cause));
}

void refuse_failed(GroupState& state, Phase phase, Milliseconds timeout) {
  const std::lock_guard<std::mutex> lock(state.failing);
  if (!state.failed) return;
  C10_THROW_ERROR(DistBackendError, peer_error(phase, state.name, state.rank, state.size, timeout,
                                               *state.failed, "an earlier call on this group failed"));
}

void wait_on_cpu(GroupState& state, const c10::intrusive_ptr<c10d::Work>& work, Phase phase,
                 Milliseconds timeout) {
  const int64_t turn = ++state.cpu_turn;
  const int64_t end = steady_ms() + timeout.count();
  bool given = false;
  for (;;) {
    const int64_t left = std::max<int64_t>(1, end - steady_ms());
    std::string cause = given ? "another rank has given up" : "no answer";
    try {
      work->wait(std::min(Milliseconds(left), kBeat));
      break;
    } catch (const std::exception& error) {
      // The end of a slice of waiting is an exception too.
      if (work->isCompleted()) {
        if (work->isSuccess()) break;
        raise_peer_error(state, state.roll("cpu"), turn, phase, timeout, cause_of(error));
      }
    }
    if (given || steady_ms() >= end) raise_peer_error(state, state.roll("cpu"), turn, phase, timeout, cause);
    given = state.roll("cpu").beat(turn, place_of(phase));
  }
  // The thread of the transport lets go of the work, and so of the tensors, a little after it is done. If it were the
  // last to hold one that Python knows, while Python ends, the process would abort.
  for (int64_t i = 0; i < 1000 && work.use_count() > 1; ++i)
    std::this_thread::sleep_for(std::chrono::microseconds(i < 100 ? 1 : 100));
}

}  // namespace transformer_plugin::expert_parallel
