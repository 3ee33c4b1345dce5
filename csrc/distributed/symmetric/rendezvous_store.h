// The store that torch's symmetric memory exchanges handles through: the group's store, with keys that agree between ranks
// (rendezvous_key.h), with waits that end, and with a key that a rank sets when it has failed.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "distributed/clock.h"
#include "distributed/symmetric/rendezvous_key.h"

namespace transformer_plugin::distributed {

// For one rendezvous: its prefix is used once.
class RendezvousStore : public c10d::Store {
 public:
  // Waits end at `end_ms` of the steady clock. `inner` is a connection that nothing else uses.
  RendezvousStore(c10::intrusive_ptr<c10d::Store> inner, std::string prefix, int64_t end_ms);

  // Lets the other ranks' waits end with an error.
  void give_up(const std::string& reason);
  // Whether a wait has ended because its time was over, or because another rank has given up.
  bool timed_out() const { return timed_out_; }
  bool another_gave_up() const { return another_gave_up_; }
  static std::string failure_key(const std::string& prefix) { return prefix + "given_up"; }

  using c10d::Store::set;
  c10::intrusive_ptr<c10d::Store> clone() override;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const Milliseconds& timeout) override;

 private:
  std::string renamed(const std::string& key);
  void wait_until(const std::vector<std::string>& keys, int64_t end_ms);

  const c10::intrusive_ptr<c10d::Store> inner_;
  const std::string prefix_;
  const int64_t end_ms_;
  std::mutex mutex_;  // guards `numbers_`
  ExchangeNumbers numbers_;
  std::atomic<bool> timed_out_{false};
  std::atomic<bool> another_gave_up_{false};
};

}  // namespace transformer_plugin::distributed
