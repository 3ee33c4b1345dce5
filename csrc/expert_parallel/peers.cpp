#include "expert_parallel/peers.h"

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
  int64_t turn = -1;
  int64_t beat = -1;
  std::string verdict;  // "-" while it waits, else the missing ranks with commas, or "none"

  std::string text() const { return std::to_string(turn) + " " + std::to_string(beat) + " " + verdict; }
  static Entry parse(const std::string& text) {
    Entry entry;
    std::istringstream(text) >> entry.turn >> entry.beat >> entry.verdict;
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
  bool present = false;

  void see(const Entry& entry, int64_t turn) {
    if (entry.turn > turn) present = true;
    if (entry.turn != turn) return;
    present = present || (first_beat && *first_beat != entry.beat);
    if (!first_beat) first_beat = entry.beat;
  }
};

struct Inquest {
  std::string prefix;
  int64_t rank;
  int64_t size;
  int64_t turn;
  int64_t beat;
  Verdict verdict;

  std::string key(int64_t of) const { return prefix + std::to_string(of); }
  void write(c10d::Store& store, const std::string& word) {
    store.set(key(rank), Entry{turn, ++beat, word}.text());
  }

  void hold(c10d::Store& store) {
    std::vector<Suspect> suspects(size);
    suspects[rank].present = true;
    const auto end = Clock::now() + kInquest;
    for (bool last = false; !last;) {
      last = Clock::now() >= end;
      write(store, "-");
      for (int64_t r = 0; r < size; ++r) {
        if (suspects[r].present || !store.check({key(r)})) continue;
        const Entry entry = Entry::parse(store.get_to_str(key(r)));
        if (entry.turn == turn && entry.verdict != "-") {
          verdict.missing = split(entry.verdict);
          return write(store, entry.verdict);
        }
        suspects[r].see(entry, turn);
      }
      const bool all =
          std::all_of(suspects.begin(), suspects.end(), [](const Suspect& s) { return s.present; });
      if (!last && !all) std::this_thread::sleep_for(Milliseconds(100));
      last = last || all;
    }
    for (int64_t r = 0; r < size; ++r) {
      if (!suspects[r].present) verdict.missing.push_back(r);
    }
    write(store, join(verdict.missing));
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

Roll::Roll(std::shared_ptr<StoreLine> line, std::string prefix, int64_t rank, int64_t size)
    : line_(std::move(line)), prefix_(std::move(prefix)), rank_(rank), size_(size) {}

void Roll::beat(int64_t turn) {
  const std::string key = prefix_ + std::to_string(rank_);
  const std::string text = Entry{turn, ++beats_, "-"}.text();
  line_->ask(kBeat, [key, text](c10d::Store& store) { store.set(key, text); });
}

Verdict Roll::inquest(int64_t turn) {
  const auto inquest = std::make_shared<Inquest>(Inquest{prefix_, rank_, size_, turn, beats_, {}});
  const std::string error =
      line_->ask(kInquest + Milliseconds(1000), [inquest](c10d::Store& store) { inquest->hold(store); });
  // Unless there was an answer, the other thread may still be writing to it.
  if (!error.empty()) return {{}, error};
  beats_ = inquest->beat;
  return inquest->verdict;
}

std::string peer_error(Phase phase, const std::string& group, int64_t rank, int64_t size,
                       Milliseconds timeout, const Verdict& verdict, const std::string& cause) {
  const PhaseName name = phase_name(phase);
  std::ostringstream text;
  text << "PeerTimeoutError: transformer_plugin::" << name.op << ": phase '" << name.phase
       << "': expected all " << size << " ranks of group '" << group << "' within " << timeout.count()
       << " ms, ";
  if (!verdict.store_error.empty()) {
    text << "rank(s) unknown did not take part: the store, whose host is often rank 0, cannot be asked ("
         << verdict.store_error << ")";
  } else if (verdict.missing.empty()) {
    text << "rank(s) unknown did not take part: all were waiting, so the transport itself failed";
  } else {
    text << "rank(s) " << join(verdict.missing) << " did not take part";
  }
  text << ". This is rank " << rank << "; the transport says: " << (cause.empty() ? "nothing" : cause)
       << ". Look at the output of those ranks; end this process, or make a new group of the ranks that are "
          "left.";
  return text.str();
}

}  // namespace transformer_plugin::expert_parallel
