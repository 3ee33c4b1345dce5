// The store of one rendezvous.
#include "distributed/symmetric/rendezvous_store.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace transformer_plugin::distributed {

RendezvousStore::RendezvousStore(c10::intrusive_ptr<c10d::Store> inner, std::string prefix, int64_t end_ms)
    : inner_(std::move(inner)), prefix_(std::move(prefix)), end_ms_(end_ms) {}

std::string RendezvousStore::renamed(const std::string& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return prefix_ + rendezvous_key(key, numbers_);
}

void RendezvousStore::give_up(const std::string& reason) { inner_->set(failure_key(prefix_), reason); }

c10::intrusive_ptr<c10d::Store> RendezvousStore::clone() {
  C10_THROW_ERROR(NotImplementedError,
                  "the store of a rendezvous has no copies: they would count its keys anew");
}

void RendezvousStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  inner_->set(renamed(key), value);
}

std::vector<uint8_t> RendezvousStore::get(const std::string& key) {
  wait_until({key}, end_ms_);
  return inner_->get(renamed(key));
}

int64_t RendezvousStore::add(const std::string& key, int64_t value) {
  return inner_->add(renamed(key), value);
}

bool RendezvousStore::deleteKey(const std::string& key) { return inner_->deleteKey(renamed(key)); }

bool RendezvousStore::check(const std::vector<std::string>& keys) {
  std::vector<std::string> all;
  for (const std::string& key : keys) all.push_back(renamed(key));
  return inner_->check(all);
}

int64_t RendezvousStore::getNumKeys() { return inner_->getNumKeys(); }

void RendezvousStore::wait(const std::vector<std::string>& keys) { wait_until(keys, end_ms_); }

void RendezvousStore::wait(const std::vector<std::string>& keys, const Milliseconds& timeout) {
  // A timeout of 0 is c10d's word for none.
  const int64_t end_ms = timeout.count() > 0 ? steady_now_ms() + timeout.count() : end_ms_;
  wait_until(keys, std::min(end_ms, end_ms_));
}

void RendezvousStore::wait_until(const std::vector<std::string>& keys, int64_t end_ms) {
  while (!check(keys)) {
    if (inner_->check({failure_key(prefix_)})) {
      another_gave_up_ = true;
      C10_THROW_ERROR(DistError, "another rank has given up: " + inner_->get_to_str(failure_key(prefix_)));
    }
    if (steady_now_ms() >= end_ms) {
      timed_out_ = true;
      C10_THROW_ERROR(DistError, "a rank did not come to the rendezvous of peer memory in time");
    }
    std::this_thread::sleep_for(Milliseconds(2));
  }
}

}  // namespace transformer_plugin::distributed
