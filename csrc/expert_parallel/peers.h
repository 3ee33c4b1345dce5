// Who of a group is there: what this process tells the others while it waits, and how it finds out afterwards
// which of them did not come.
//
// A wait that takes longer than a second writes "<turn> <beat> <verdict>" under the rank's own key of the
// group's store, once a second. Turns count the waits of one kind and agree between ranks, because all ranks
// make the same calls in the same order. When a wait fails, each survivor keeps writing for two seconds and
// reads the others' keys: a rank is there when its turn is later, or the same with a moving beat; else it is
// missing. The list of missing ranks is the verdict; who comes later takes over a verdict already given, so a
// survivor that has left meanwhile is not blamed. Nothing is written when nobody has to wait.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "expert_parallel/phase.h"

namespace c10d {
class Store;
}

namespace transformer_plugin::expert_parallel {

using Milliseconds = std::chrono::milliseconds;

// How long a wait is silent before it is told to the others, and how long they are asked after a failure.
inline constexpr Milliseconds kBeat{1000};
inline constexpr Milliseconds kInquest{2000};
// For the first connection.
inline constexpr Milliseconds kConnect{10000};

// The store of a group, spoken to on threads of their own because its host may be stopped and then never answers.
class StoreLine {
 public:
  explicit StoreLine(const c10::intrusive_ptr<c10d::Store>& store);
  // Runs `talk`; returns "" or why the store did not answer within `limit`. `talk` must own what it touches:
  // it is left running when the time is over. After a failure the store is never asked again.
  std::string ask(Milliseconds limit, const std::function<void(c10d::Store&)>& talk);

 private:
  struct State;
  std::string speak(Milliseconds limit, std::function<void(c10d::Store*)> talk);

  std::shared_ptr<State> state_;
};

struct Verdict {
  std::vector<int64_t> missing;
  std::string store_error;  // not empty: the store did not answer, nobody could be asked
};

// One kind of wait ("cpu", "gpu", "host") of one rank.
class Roll {
 public:
  Roll(std::shared_ptr<StoreLine> line, std::string prefix, int64_t rank, int64_t size);
  // This rank is waiting in `turn`. Quick, and silent about failures.
  void beat(int64_t turn);
  // Asks for two seconds who else is there.
  Verdict inquest(int64_t turn);

 private:
  std::shared_ptr<StoreLine> line_;
  std::string prefix_;
  int64_t rank_;
  int64_t size_;
  int64_t beats_ = 0;
};

// The text of the error, which begins with "PeerTimeoutError: ".
std::string peer_error(Phase phase, const std::string& group, int64_t rank, int64_t size,
                       Milliseconds timeout, const Verdict& verdict, const std::string& cause);

}  // namespace transformer_plugin::expert_parallel
