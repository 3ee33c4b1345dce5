// Heartbeats, the liveness check, and the text of PeerTimeoutError.
#include "distributed/liveness.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace transformer_plugin::distributed {
namespace {

// The value of a rank's key in the store.
struct HeartbeatEntry {
  std::string kind;
  int64_t sequence = -1;
  int64_t count = -1;
  std::string phase;

  std::string text() const {
    return kind + " " + std::to_string(sequence) + " " + std::to_string(count) + " " + phase;
  }
  static HeartbeatEntry parse(const std::string& text) {
    HeartbeatEntry entry;
    std::istringstream stream(text);
    stream >> entry.kind >> entry.sequence >> entry.count >> std::ws;
    std::getline(stream, entry.phase);
    return entry;
  }
};

std::string heartbeat_key(const std::string& prefix, int64_t rank) {
  return prefix + "heartbeat/" + std::to_string(rank);
}

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

// What a liveness check knows of one rank.
struct RankStatus {
  std::optional<int64_t> first_count;
  std::string phase;
  bool alive = false;

  void update(const HeartbeatEntry& entry, const std::string& kind, int64_t sequence) {
    phase = entry.phase;
    alive = alive || (entry.kind == kind && entry.sequence > sequence);
    alive = alive || (first_count && *first_count != entry.count);
    if (!first_count) first_count = entry.count;
  }
};

// A report in the store: the missing ranks with commas, or "none"; then what each rank waits for.
LivenessReport parse_report(const std::string& text) {
  const size_t space = text.find(' ');
  LivenessReport report;
  report.missing = split(text.substr(0, space));
  if (space != std::string::npos) report.waits = text.substr(space + 1);
  return report;
}

struct LivenessCheck {
  std::string prefix;
  std::string kind;
  int64_t rank;
  int64_t size;
  int64_t sequence;
  std::string phase;
  std::shared_ptr<std::atomic<int64_t>> count;
  LivenessReport report;

  std::string report_key() const { return prefix + kReportKey; }

  bool read_report(c10d::Store& store) {
    if (!store.check({report_key()})) return false;
    report = parse_report(store.get_to_str(report_key()));
    return true;
  }

  void run(c10d::Store& store) {
    std::vector<RankStatus> statuses(size);
    statuses[rank].alive = true;
    statuses[rank].phase = phase;
    const int64_t end = steady_now_ms() + kLivenessCheckDuration.count();
    for (bool last = false; !last;) {
      last = steady_now_ms() >= end;
      store.set(heartbeat_key(prefix, rank), HeartbeatEntry{kind, sequence, ++*count, phase}.text());
      if (read_report(store)) return;
      for (int64_t r = 0; r < size; ++r) {
        if (statuses[r].alive || !store.check({heartbeat_key(prefix, r)})) continue;
        statuses[r].update(HeartbeatEntry::parse(store.get_to_str(heartbeat_key(prefix, r))), kind, sequence);
      }
      const bool all_alive =
          std::all_of(statuses.begin(), statuses.end(), [](const RankStatus& s) { return s.alive; });
      if (!last && !all_alive) std::this_thread::sleep_for(Milliseconds(100));
      last = last || all_alive;
    }
    publish_report(store, statuses);
  }

  // Writes the report, or takes over one that another rank has written meanwhile.
  void publish_report(c10d::Store& store, const std::vector<RankStatus>& statuses) {
    std::string waits;
    bool differ = false;
    for (int64_t r = 0; r < size; ++r) {
      if (!statuses[r].alive) report.missing.push_back(r);
      differ = differ || statuses[r].phase != statuses[0].phase;
      waits += (r ? ", rank " : "rank ") + std::to_string(r) + " in " + statuses[r].phase;
    }
    std::string text = join(report.missing);
    if (report.missing.empty() && differ) text += " " + (report.waits = waits);
    try {
      const std::string first = store.compareSet(report_key(), "", text);
      if (!first.empty()) report = parse_report(first);
    } catch (const c10::NotImplementedError&) {  // FileStore has no compareSet
      store.set(report_key(), text);
    }
  }
};

}  // namespace

Heartbeat::Heartbeat(std::shared_ptr<StoreClient> store, std::string prefix, std::string kind, int64_t rank,
                     int64_t size, std::shared_ptr<std::atomic<int64_t>> count)
    : store_(std::move(store)),
      prefix_(std::move(prefix)),
      kind_(std::move(kind)),
      rank_(rank),
      size_(size),
      count_(std::move(count)) {}

bool Heartbeat::send(c10d::Store& store, int64_t sequence, const std::string& phase) const {
  store.set(heartbeat_key(prefix_, rank_), HeartbeatEntry{kind_, sequence, ++*count_, phase}.text());
  return store.check({prefix_ + kReportKey});
}

bool Heartbeat::send(int64_t sequence, const std::string& phase) {
  const auto has_report = std::make_shared<std::atomic<bool>>(false);
  const std::string error =
      store_->request(kStoreRequestLimit, [self = *this, has_report, sequence, phase](c10d::Store& store) {
        *has_report = self.send(store, sequence, phase);
      });
  return error.empty() && *has_report;
}

LivenessReport Heartbeat::find_missing_ranks(int64_t sequence, const std::string& phase) {
  const auto check = std::make_shared<LivenessCheck>(
      LivenessCheck{prefix_, kind_, rank_, size_, sequence, phase, count_, {}});
  const std::string error = store_->request(kLivenessCheckDuration + kStoreRequestLimit,
                                            [check](c10d::Store& store) { check->run(store); });
  // After an error the abandoned thread may still write to `check`.
  if (!error.empty()) return {{}, "", error};
  return check->report;
}

std::string peer_error(const Phase& phase, const std::string& group, int64_t rank, int64_t size,
                       Milliseconds timeout, const LivenessReport& report, const std::string& backend_error) {
  std::ostringstream text;
  text << "PeerTimeoutError: transformer_plugin::" << phase.op << ": phase '" << phase.name
       << "': expected all " << size << " ranks of group '" << group << "' within " << timeout.count()
       << " ms, ";
  if (!report.store_error.empty()) {
    text << "could not determine the missing ranks (store unreachable; rank 0 usually hosts it): "
         << report.store_error;
  } else if (report.missing.empty()) {
    text << "no rank is missing: all were waiting, "
         << (report.waits.empty() ? "so the backend itself failed" : "in different calls: ") << report.waits;
  } else {
    text << "rank(s) " << join(report.missing) << " did not take part";
  }
  const bool late = std::count(report.missing.begin(), report.missing.end(), rank) > 0;
  text
      << ". This is rank " << rank << (late ? ", which came too late or left out a call" : "")
      << "; backend error: " << (backend_error.empty() ? "none" : backend_error)
      << ". Look at the output of those ranks; end this process, or make a new group of the remaining ranks.";
  return text.str();
}

}  // namespace transformer_plugin::distributed
