#include "expert_parallel/watch.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace transformer_plugin::expert_parallel {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<GroupState>> groups;
  std::map<std::string, int64_t> generations;
};

// Of this process: a forked child starts with an empty one, whatever locks the parent's threads held.
Registry& registry() {
  static std::atomic<Registry*> current{nullptr};
  static std::atomic<pid_t> owner{0};
  static std::mutex making;
  if (owner.load(std::memory_order_acquire) != getpid()) {
    const std::lock_guard<std::mutex> lock(making);
    if (owner.load() != getpid()) {
      current.store(new Registry);  // never freed: threads may use it until the process is gone
      owner.store(getpid(), std::memory_order_release);
    }
  }
  return *current.load(std::memory_order_acquire);
}

}  // namespace

std::shared_ptr<GroupState> group_state(const std::string& name, const c10d::ProcessGroup* group,
                                        int64_t rank, int64_t size) {
  Registry& groups = registry();
  const std::lock_guard<std::mutex> lock(groups.mutex);
  std::shared_ptr<GroupState>& entry = groups.groups[name];
  if (entry && entry->group == group) return entry;
  entry = std::make_shared<GroupState>();
  entry->name = name;
  entry->rank = rank;
  entry->size = size;
  entry->group = group;
  entry->keys = "transformer_plugin/" + std::to_string(groups.generations[name]++) + "/";
  entry->line = std::make_shared<StoreLine>(group ? group->getStore() : nullptr);
  return entry;
}

void forget_group(const std::string& name) {
  Registry& groups = registry();
  const std::lock_guard<std::mutex> lock(groups.mutex);
  groups.groups.erase(name);
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

void raise_peer_error(GroupState& state, Roll& roll, int64_t turn, Phase phase, Milliseconds timeout,
                      const std::string& cause) {
  const Verdict verdict = roll.inquest(turn);
  C10_THROW_ERROR(DistBackendError,
                  peer_error(phase, state.name, state.rank, state.size, timeout, verdict, cause));
}

void wait_on_cpu(GroupState& state, c10d::Work& work, Phase phase, Milliseconds timeout) {
  const int64_t turn = ++state.cpu_turn;
  const int64_t end = steady_ms() + timeout.count();
  Roll roll(state.line, state.keys + "cpu/", state.rank, state.size);
  for (;;) {
    const int64_t left = std::max<int64_t>(1, end - steady_ms());
    std::string cause = "no answer";
    try {
      work.wait(std::min(Milliseconds(left), kBeat));
      return;
    } catch (const std::exception& error) {
      // The end of a slice of waiting is an exception too.
      if (work.isCompleted()) {
        if (work.isSuccess()) return;
        raise_peer_error(state, roll, turn, phase, timeout, cause_of(error));
      }
    }
    if (steady_ms() >= end) raise_peer_error(state, roll, turn, phase, timeout, cause);
    roll.beat(turn);
  }
}

}  // namespace transformer_plugin::expert_parallel
