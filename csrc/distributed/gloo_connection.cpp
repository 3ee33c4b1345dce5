#include "distributed/gloo_connection.h"

#include <condition_variable>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace transformer_plugin::expert_parallel {
namespace {

// What a connection may take beyond the timeout: TCP sends a lost first packet again after a second.
constexpr Milliseconds kGrace{1500};

// The group's store over the connection that is there. It waits by asking again, so that nobody waits behind it.
class AskingStore : public c10d::Store {
 public:
  explicit AskingStore(c10::intrusive_ptr<c10d::Store> store, std::string prefix)
      : store_(std::move(store)), prefix_(std::move(prefix)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<AskingStore>(store_, prefix_);
  }
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    store_->set(prefix_ + key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    wait({key});
    return store_->get(prefix_ + key);
  }
  int64_t add(const std::string& key, int64_t value) override { return store_->add(prefix_ + key, value); }
  bool deleteKey(const std::string& key) override { return store_->deleteKey(prefix_ + key); }
  bool check(const std::vector<std::string>& keys) override {
    std::vector<std::string> full;
    for (const std::string& key : keys) full.push_back(prefix_ + key);
    return store_->check(full);
  }
  int64_t getNumKeys() override { return store_->getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override { wait(keys, kDefaultTimeout); }
  void wait(const std::vector<std::string>& keys, const Milliseconds& timeout) override {
    const int64_t end = steady_ms() + timeout.count();
    while (!check(keys)) {
      if (steady_ms() >= end) C10_THROW_ERROR(DistStoreError, "no address of a rank in time");
      std::this_thread::sleep_for(Milliseconds(2));
    }
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;
};

struct Connecting {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  c10::intrusive_ptr<c10d::Backend> made;
  std::string error;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> open_transport(GroupState& state,
                                                 const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                 Phase phase, Milliseconds timeout) {
  const c10::intrusive_ptr<c10d::Backend> parent = group->getBackend(at::kCPU);
  if (parent->getBackendName() != "gloo" || !parent->supportsSplitting()) return parent;
  const auto connecting = std::make_shared<Connecting>();
  // On a thread, because Gloo's own bound is the timeout of the group. It is left alone when ours is over.
  std::thread([connecting, parent, store = state.line->connection(), keys = state.keys(),
               rank = static_cast<int>(state.rank), size = static_cast<int>(state.size)] {
    c10::intrusive_ptr<c10d::Backend> made;
    std::string error;
    try {
      TORCH_CHECK(store, "no connection to the store of the group");
      const auto own = c10::make_intrusive<AskingStore>(store, keys + "gloo/");
      // A split would look the ranks up in a list that a group made again does not have.
      made = parent->merge(own, parent->getBackendOptions(), rank, size);
    } catch (const std::exception& e) {
      error = cause_of(e);
    }
    const std::lock_guard<std::mutex> lock(connecting->mutex);
    connecting->made = std::move(made);
    connecting->error = error;
    connecting->done = true;
    connecting->changed.notify_all();
  }).detach();
  const int64_t turn = state.cpu_turn + 1;  // that of the first collective
  const int64_t end = steady_ms() + (timeout + kGrace).count();
  bool given = false;
  std::unique_lock<std::mutex> lock(connecting->mutex);
  while (!connecting->changed.wait_for(lock, kBeat, [&] { return connecting->done; })) {
    if (given || steady_ms() >= end) {
      raise_peer_error(state, state.roll("cpu"), turn, phase, timeout,
                       given ? "another rank has given up" : "no connection");
    }
    given = state.roll("cpu").beat(turn, place_of(phase));
  }
  if (!connecting->made) raise_peer_error(state, state.roll("cpu"), turn, phase, timeout, connecting->error);
  return std::move(connecting->made);
}

}  // namespace transformer_plugin::expert_parallel
