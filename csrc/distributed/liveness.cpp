#include "distributed/liveness.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace transformer_plugin::expert_parallel {
namespace {

using Clock = std::chrono::steady_clock;

// What a rank's key holds.
struct Entry {
  std::string kind;
  int64_t turn = -1;
  int64_t beat = -1;
  std::string place;

  std::string text() const {
    return kind + " " + std::to_string(turn) + " " + std::to_string(beat) + " " + place;
  }
  static Entry parse(const std::string& text) {
    Entry entry;
    std::istringstream stream(text);
    stream >> entry.kind >> entry.turn >> entry.beat >> std::ws;
    std::getline(stream, entry.place);
    return entry;
  }
};

std::string join(const std::vector<int64_t>& ranks) {
  std::string text;
  for (const int64_t rank : ranks) text += (text.empty() ? "" : ",") + std::to_string(rank);
  return text.empty() ? "none" : text;
}

std::vector<int64_t> split(const std::string& text) {
  std::vector<int64_t> ranks;
  std::istringstream stream(text == "none" ? "" : text);
  for (std::string rank; std::getline(stream, rank, ',');) ranks.push_back(std::stoll(rank));
  return ranks;
}

// What is known of one other rank during an inquest.
struct Suspect {
  std::optional<int64_t> first_beat;
  std::string place;
  bool present = false;

  void see(const Entry& entry, const std::string& kind, int64_t turn) {
    place = entry.place;
    present = present || (entry.kind == kind && entry.turn > turn);
    present = present || (first_beat && *first_beat != entry.beat);
    if (!first_beat) first_beat = entry.beat;
  }
};

// A verdict in the store: the missing ranks with commas, or "none"; then where everybody was waiting.
Verdict parse_verdict(const std::string& text) {
  const size_t space = text.find(' ');
  Verdict verdict;
  verdict.missing = split(text.substr(0, space));
  if (space != std::string::npos) verdict.places = text.substr(space + 1);
  return verdict;
}

struct Inquest {
  std::string prefix;
  std::string kind;
  int64_t rank;
  int64_t size;
  int64_t turn;
  std::string place;
  std::shared_ptr<std::atomic<int64_t>> beats;
  Verdict verdict;

  std::string key(int64_t of) const { return prefix + "waits/" + std::to_string(of); }
  std::string verdict_key() const { return prefix + "verdict"; }

  bool given(c10d::Store& store) {
    if (!store.check({verdict_key()})) return false;
    verdict = parse_verdict(store.get_to_str(verdict_key()));
    return true;
  }

  void hold(c10d::Store& store) {
    std::vector<Suspect> suspects(size);
    suspects[rank].present = true;
    suspects[rank].place = place;
    const auto end = Clock::now() + kInquest;
    for (bool last = false; !last;) {
      last = Clock::now() >= end;
      store.set(key(rank), Entry{kind, turn, ++*beats, place}.text());
      if (given(store)) return;
      for (int64_t r = 0; r < size; ++r) {
        if (suspects[r].present || !store.check({key(r)})) continue;
        suspects[r].see(Entry::parse(store.get_to_str(key(r))), kind, turn);
      }
      const bool all =
          std::all_of(suspects.begin(), suspects.end(), [](const Suspect& s) { return s.present; });
      if (!last && !all) std::this_thread::sleep_for(Milliseconds(100));
      last = last || all;
    }
    settle(store, suspects);
  }

  // The first verdict of the group holds.
  void settle(c10d::Store& store, const std::vector<Suspect>& suspects) {
    std::string places;
    bool differ = false;
    for (int64_t r = 0; r < size; ++r) {
      if (!suspects[r].present) verdict.missing.push_back(r);
      differ = differ || suspects[r].place != suspects[0].place;
      places += (r ? ", rank " : "rank ") + std::to_string(r) + " in " + suspects[r].place;
    }
    std::string text = join(verdict.missing);
    if (verdict.missing.empty() && differ) text += " " + (verdict.places = places);
    try {
      const std::string first = store.compareSet(verdict_key(), "", text);
      if (!first.empty()) verdict = parse_verdict(first);
    } catch (const c10::NotImplementedError&) {  // a store of files has no such thing
      store.set(verdict_key(), text);
    }
  }
};

}  // namespace

struct StoreLine::State {
  std::mutex speaking;  // one question at a time
  std::mutex mutex;     // guards what follows
  std::condition_variable changed;
  c10::intrusive_ptr<c10d::Store> store;
  std::string broken;  // why it is not asked any more
};

StoreLine::StoreLine(const c10::intrusive_ptr<c10d::Store>& store) : state_(std::make_shared<State>()) {
  if (!store) {
    state_->broken = "the group has no store";
    return;
  }
  // A connection of our own: nobody else waits behind us, and the store that hosts is not kept alive by us.
  speak(kConnect, [state = state_, store](c10d::Store*) { state->store = store->clone(); });
}

std::string StoreLine::ask(Milliseconds limit, const std::function<void(c10d::Store&)>& talk) {
  return speak(limit, [talk](c10d::Store* store) { talk(*store); });
}

c10::intrusive_ptr<c10d::Store> StoreLine::connection() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->broken.empty() ? state_->store : nullptr;
}

std::string StoreLine::speak(Milliseconds limit, std::function<void(c10d::Store*)> talk) {
  struct Answer {
    bool done = false;
    std::string error;
  };
  const auto answer = std::make_shared<Answer>();
  const std::lock_guard<std::mutex> turn(state_->speaking);
  std::unique_lock<std::mutex> lock(state_->mutex);
  if (!state_->broken.empty()) return state_->broken;
  std::thread([state = state_, answer, talk = std::move(talk)]() mutable {
    std::string error;
    try {
      talk(state->store.get());
    } catch (const std::exception& e) {
      error = std::string(e.what()).substr(0, 200);
      error = error.substr(0, error.find('\n'));
      if (error.empty()) error = "unknown error";
    }
    talk = nullptr;
    const std::lock_guard<std::mutex> guard(state->mutex);
    answer->error = error;
    answer->done = true;
    state->changed.notify_all();
  }).detach();
  const bool done = state_->changed.wait_for(lock, limit, [&] { return answer->done; });
  if (!done) {
    state_->broken = "no answer within " + std::to_string(limit.count()) + " ms";
  } else {
    state_->broken = answer->error;
  }
  return state_->broken;
}

Roll::Roll(std::shared_ptr<StoreLine> line, std::string prefix, std::string kind, int64_t rank, int64_t size,
           std::shared_ptr<std::atomic<int64_t>> beats)
    : line_(std::move(line)),
      prefix_(std::move(prefix)),
      kind_(std::move(kind)),
      rank_(rank),
      size_(size),
      beats_(std::move(beats)) {}

bool Roll::beat(c10d::Store& store, int64_t turn, const std::string& place) const {
  store.set(prefix_ + "waits/" + std::to_string(rank_), Entry{kind_, turn, ++*beats_, place}.text());
  return store.check({prefix_ + "verdict"});
}

bool Roll::beat(int64_t turn, const std::string& place) {
  const auto given = std::make_shared<std::atomic<bool>>(false);
  const std::string error = line_->ask(kAnswer, [self = *this, given, turn, place](c10d::Store& store) {
    *given = self.beat(store, turn, place);
  });
  return error.empty() && *given;
}

Verdict Roll::inquest(int64_t turn, const std::string& place) {
  const auto inquest =
      std::make_shared<Inquest>(Inquest{prefix_, kind_, rank_, size_, turn, place, beats_, {}});
  const std::string error =
      line_->ask(kInquest + kAnswer, [inquest](c10d::Store& store) { inquest->hold(store); });
  // Unless there was an answer, the other thread may still be writing to it.
  if (!error.empty()) return {{}, "", error};
  return inquest->verdict;
}

std::string place_of(Phase phase) {
  const PhaseName name = phase_name(phase);
  return std::string(name.op) + " (" + name.phase + ")";
}

std::string peer_error(Phase phase, const std::string& group, int64_t rank, int64_t size,
                       Milliseconds timeout, const Verdict& verdict, const std::string& cause) {
  const PhaseName name = phase_name(phase);
  std::ostringstream text;
  text << "PeerTimeoutError: transformer_plugin::" << name.op << ": phase '" << name.phase
       << "': expected all " << size << " ranks of group '" << group << "' within " << timeout.count()
       << " ms, ";
  if (!verdict.store_error.empty()) {
    text << "rank(s) unknown did not take part: the store is unreachable (rank 0 usually hosts it; "
         << verdict.store_error << ")";
  } else if (verdict.missing.empty()) {
    text << "rank(s) unknown did not take part: all were waiting, "
         << (verdict.places.empty() ? "so the transport itself failed" : "in different calls: ")
         << verdict.places;
  } else {
    text << "rank(s) " << join(verdict.missing) << " did not take part";
  }
  const bool late = std::count(verdict.missing.begin(), verdict.missing.end(), rank) > 0;
  text << ". This is rank " << rank << (late ? ", which came too late or left out a call" : "")
       << "; backend error: " << (cause.empty() ? "none" : cause)
       << ". Look at the output of those ranks; end this process, or make a new group of the ranks that are "
          "left.";
  return text.str();
}

}  // namespace transformer_plugin::expert_parallel
