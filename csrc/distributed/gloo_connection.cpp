// Creation of the separate Gloo backend, bounded in time.
#include "distributed/gloo_connection.h"

#include <condition_variable>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace transformer_plugin::distributed {
namespace {

// Time that connecting may take in addition to the timeout: TCP repeats a lost first packet only after a
// second.
constexpr Milliseconds kConnectGrace{1500};

// The group's store through the existing connection. wait() polls, so that it does not block the connection
// for others.
class PollingStore : public c10d::Store {
 public:
  explicit PollingStore(c10::intrusive_ptr<c10d::Store> store, std::string prefix)
      : store_(std::move(store)), prefix_(std::move(prefix)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<PollingStore>(store_, prefix_);
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
    const int64_t end = steady_now_ms() + timeout.count();
    while (!check(keys)) {
      if (steady_now_ms() >= end) C10_THROW_ERROR(DistStoreError, "no address of a rank in time");
      std::this_thread::sleep_for(Milliseconds(2));
    }
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;
};

struct ConnectResult {
  std::mutex mutex;
  std::condition_variable finished;
  bool done = false;
  c10::intrusive_ptr<c10d::Backend> backend;
  std::string error;
};

// Creates the backend on a thread, because Gloo bounds this by the timeout of the group, not by ours. The
// thread is abandoned when our time is over.
std::shared_ptr<ConnectResult> start_connecting(ProcessGroupState& state,
                                                const c10::intrusive_ptr<c10d::Backend>& parent) {
  const auto result = std::make_shared<ConnectResult>();
  std::thread([result, parent, store = state.store->connection(), prefix = state.key_prefix(),
               rank = static_cast<int>(state.rank), size = static_cast<int>(state.size)] {
    c10::intrusive_ptr<c10d::Backend> backend;
    std::string error;
    try {
      TORCH_CHECK(store, "no connection to the store of the group");
      const auto polling_store = c10::make_intrusive<PollingStore>(store, prefix + "gloo/");
      // Not split(): it looks the ranks up in a list that a group created again does not have.
      backend = parent->merge(polling_store, parent->getBackendOptions(), rank, size);
    } catch (const std::exception& e) {
      error = first_line(e);
    }
    const std::lock_guard<std::mutex> lock(result->mutex);
    result->backend = std::move(backend);
    result->error = error;
    result->done = true;
    result->finished.notify_all();
  }).detach();
  return result;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> connect_cpu_backend(ProcessGroupState& state,
                                                      const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                                      const Phase& phase, Milliseconds timeout) {
  const c10::intrusive_ptr<c10d::Backend> parent = group->getBackend(at::kCPU);
  if (parent->getBackendName() != "gloo" || !parent->supportsSplitting()) return parent;
  const auto result = start_connecting(state, parent);
  const int64_t sequence = state.cpu_sequence + 1;  // that of the first collective
  const int64_t end = steady_now_ms() + (timeout + kConnectGrace).count();
  bool has_report = false;
  std::unique_lock<std::mutex> lock(result->mutex);
  while (!result->finished.wait_for(lock, kHeartbeatInterval, [&] { return result->done; })) {
    if (has_report || steady_now_ms() >= end) {
      raise_peer_error(state, state.heartbeat("cpu"), sequence, phase, timeout,
                       has_report ? "another rank has given up" : "no connection");
    }
    has_report = state.heartbeat("cpu").send(sequence, phase_text(phase));
  }
  if (!result->backend)
    raise_peer_error(state, state.heartbeat("cpu"), sequence, phase, timeout, result->error);
  return std::move(result->backend);
}

}  // namespace transformer_plugin::distributed
