// Requests to a group's store, each on a thread with a time limit.
#include "distributed/store_client.h"

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace transformer_plugin::distributed {

struct StoreClient::State {
  std::mutex request_mutex;  // one request at a time
  std::mutex mutex;          // guards the members below
  std::condition_variable finished;
  c10::intrusive_ptr<c10d::Store> store;
  std::string failure;  // not empty: the reason why the store is not used any more
};

StoreClient::StoreClient(const c10::intrusive_ptr<c10d::Store>& store) : state_(std::make_shared<State>()) {
  if (!store) {
    state_->failure = "the group has no store";
    return;
  }
  // A clone has its own connection, so requests do not block the program's use of the store, and a store that
  // this process hosts is not kept alive.
  run_on_thread(kStoreConnectLimit, [state = state_, store](c10d::Store*) { state->store = store->clone(); });
}

std::string StoreClient::request(Milliseconds limit, const std::function<void(c10d::Store&)>& operation) {
  return run_on_thread(limit, [operation](c10d::Store* store) { operation(*store); });
}

c10::intrusive_ptr<c10d::Store> StoreClient::connection() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->failure.empty() ? state_->store : nullptr;
}

std::string StoreClient::run_on_thread(Milliseconds limit, std::function<void(c10d::Store*)> operation) {
  struct Result {
    bool done = false;
    std::string error;
  };
  const auto result = std::make_shared<Result>();
  const std::lock_guard<std::mutex> request_lock(state_->request_mutex);
  std::unique_lock<std::mutex> lock(state_->mutex);
  if (!state_->failure.empty()) return state_->failure;
  std::thread([state = state_, result, operation = std::move(operation)]() mutable {
    std::string error;
    try {
      operation(state->store.get());
    } catch (const std::exception& e) {
      error = std::string(e.what()).substr(0, 200);
      error = error.substr(0, error.find('\n'));
      if (error.empty()) error = "unknown error";
    }
    operation = nullptr;  // destroys what it owns before the caller goes on
    const std::lock_guard<std::mutex> guard(state->mutex);
    result->error = error;
    result->done = true;
    state->finished.notify_all();
  }).detach();
  const bool done = state_->finished.wait_for(lock, limit, [&] { return result->done; });
  if (!done) {
    state_->failure = "no answer within " + std::to_string(limit.count()) + " ms";
  } else {
    state_->failure = result->error;
  }
  return state_->failure;
}

}  // namespace transformer_plugin::distributed
