// Which ranks of a group are alive: the heartbeats that a waiting rank writes to the group's store, and the
// liveness check that finds the missing ranks after a wait has failed.
//
// A rank that has waited for half a second writes a heartbeat under its own key twice a second: a counter,
// the sequence number of the wait, and the phase. Nothing is written while nobody waits for long. When a wait
// fails, each remaining rank keeps writing heartbeats for two seconds and reads the keys of the others. A
// rank counts as alive in two cases:
// - Its counter changes, whatever it waits for: it may wait for the missing rank in another call.
// - It has waited with a later sequence number of the same kind. Sequence numbers agree between ranks,
//   because all ranks make the same calls in the same order.
//
// All other ranks are missing.
//
// The first rank that has a list of missing ranks writes it to the store as the group's liveness report, and
// the others take it over. So all remaining ranks name the same ranks, and a rank that ends after its own
// error is not named. A group has one report, because it is not used again afterwards.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "distributed/clock.h"
#include "distributed/phase.h"
#include "distributed/store_client.h"

namespace transformer_plugin::distributed {

inline constexpr Milliseconds kHeartbeatInterval{500};
inline constexpr Milliseconds kLivenessCheckDuration{2000};

struct LivenessReport {
  std::vector<int64_t> missing;
  std::string waits;        // what each rank waits for, if no rank is missing and these differ
  std::string store_error;  // not empty: the store did not answer, so nothing is known
};

// The heartbeats of one rank for one kind of wait ("cpu", "gpu", "host", ...).
class Heartbeat {
 public:
  // `prefix`: of the group's keys. `count`: the counter of this rank in this group, shared by all kinds.
  Heartbeat(std::shared_ptr<StoreClient> store, std::string prefix, std::string kind, int64_t rank,
            int64_t size, std::shared_ptr<std::atomic<int64_t>> count);
  // Writes that this rank waits for `phase` with this sequence number. Returns whether the group has a
  // liveness report, so that there is no use in waiting. Ignores failures of the store.
  bool send(int64_t sequence, const std::string& phase);
  // The same inside a request to the store.
  bool send(c10d::Store& store, int64_t sequence, const std::string& phase) const;
  // The liveness check; takes two seconds unless another rank has a report already.
  LivenessReport find_missing_ranks(int64_t sequence, const std::string& phase);

 private:
  std::shared_ptr<StoreClient> store_;
  std::string prefix_;
  std::string kind_;
  int64_t rank_;
  int64_t size_;
  std::shared_ptr<std::atomic<int64_t>> count_;
};

// Key of the liveness report among the group's keys.
inline constexpr const char* kReportKey = "missing_ranks";

// The text of the error that transformer_plugin.errors.PeerTimeoutError parses. It begins with
// "PeerTimeoutError: ".
std::string peer_error(const Phase& phase, const std::string& group, int64_t rank, int64_t size,
                       Milliseconds timeout, const LivenessReport& report, const std::string& backend_error);

}  // namespace transformer_plugin::distributed
