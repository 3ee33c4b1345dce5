// Who of a group is there: what this process tells the others while it waits, and how it finds out afterwards
// which of them did not come.
//
// A wait that takes longer than half a second writes a line under the rank's own key of the group's store, twice a
// second: a number that moves (the beat), and where it waits. When a wait fails, each survivor keeps writing for two
// seconds and reads the others' keys. A rank whose beat moves is there, wherever it waits: it may wait for the lost
// rank in another call. So is one that has waited in a later turn of the same kind. Turns count the waits of one kind
// and agree between ranks, because all ranks make the same calls in the same order. The others are missing.
//
// The list of missing ranks is the verdict. There is one for a group, which is of no use after it: the first survivor
// that has one writes it, the others take it over. So all survivors name the same ranks, and one that has left
// meanwhile is not blamed. Nothing is written when nobody has to wait.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "distributed/phase.h"

namespace c10d {
class Store;
}

namespace transformer_plugin::expert_parallel {

using Milliseconds = std::chrono::milliseconds;

// How long a wait is silent before it is told to the others, and how long they are asked after a failure.
inline constexpr Milliseconds kBeat{500};
inline constexpr Milliseconds kInquest{2000};
// How long the store has to answer one question, and for the first connection.
inline constexpr Milliseconds kAnswer{1000};
inline constexpr Milliseconds kConnect{10000};

// The store of a group, spoken to on threads of their own because its host may be stopped and then never answers.
class StoreLine {
 public:
  explicit StoreLine(const c10::intrusive_ptr<c10d::Store>& store);
  // Runs `talk`; returns "" or why the store did not answer within `limit`. `talk` must own what it touches:
  // it is left running when the time is over. After a failure the store is never asked again.
  std::string ask(Milliseconds limit, const std::function<void(c10d::Store&)>& talk);
  // The connection itself, for questions that take long; null when there is none.
  c10::intrusive_ptr<c10d::Store> connection() const;

 private:
  struct State;
  std::string speak(Milliseconds limit, std::function<void(c10d::Store*)> talk);

  std::shared_ptr<State> state_;
};

struct Verdict {
  std::vector<int64_t> missing;
  std::string places;       // where each rank waits, when nobody is missing and they are different calls
  std::string store_error;  // not empty: the store did not answer, nobody could be asked
};

// One kind of wait ("cpu", "gpu", "host", "store") of one rank.
class Roll {
 public:
  // `prefix`: of the group's keys. `beats`: of this rank in this group, for all kinds.
  Roll(std::shared_ptr<StoreLine> line, std::string prefix, std::string kind, int64_t rank, int64_t size,
       std::shared_ptr<std::atomic<int64_t>> beats);
  // This rank is waiting in `turn` at `place`. Quick, and silent about failures. Returns whether another rank has
  // given a verdict, so that waiting is of no use.
  bool beat(int64_t turn, const std::string& place);
  // The same, by who speaks to the store already.
  bool beat(c10d::Store& store, int64_t turn, const std::string& place) const;
  // Asks for two seconds who else is there.
  Verdict inquest(int64_t turn, const std::string& place);

 private:
  std::shared_ptr<StoreLine> line_;
  std::string prefix_;
  std::string kind_;
  int64_t rank_;
  int64_t size_;
  std::shared_ptr<std::atomic<int64_t>> beats_;
};

// "dispatch (tokens)".
std::string place_of(Phase phase);

// The text of the error, which begins with "PeerTimeoutError: ".
std::string peer_error(Phase phase, const std::string& group, int64_t rank, int64_t size,
                       Milliseconds timeout, const Verdict& verdict, const std::string& cause);

}  // namespace transformer_plugin::expert_parallel
