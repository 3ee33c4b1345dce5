// A group's store, accessed with a time limit on every request: the process that hosts it may have stopped,
// and then it never answers.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <memory>
#include <string>

#include "distributed/clock.h"

namespace c10d {
class Store;
}

namespace transformer_plugin::distributed {

// Limit of one request to the store, and of the first connection.
inline constexpr Milliseconds kStoreRequestLimit{1000};
inline constexpr Milliseconds kStoreConnectLimit{10000};

// Every request runs on a separate thread, which is abandoned when it exceeds its limit.
class StoreClient {
 public:
  // Opens a connection separate from that of the group. Null: the group has no store.
  explicit StoreClient(const c10::intrusive_ptr<c10d::Store>& store);
  // Runs `operation`; returns "" or the reason why it failed. `operation` must own all data that it touches,
  // because it goes on after `limit`. After a failure the store is never used again: each request returns the
  // same reason.
  std::string request(Milliseconds limit, const std::function<void(c10d::Store&)>& operation);
  // The connection itself, for use without a limit; null after a failure.
  c10::intrusive_ptr<c10d::Store> connection() const;

 private:
  struct State;
  std::string run_on_thread(Milliseconds limit, std::function<void(c10d::Store*)> operation);

  std::shared_ptr<State> state_;
};

}  // namespace transformer_plugin::distributed
